//! The report of a run: what was asked, what came of it, and how far it can be trusted. Made by the engine from
//! records, rendered by benchctl, saved with the records as `raw_metrics`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::interval::{Interval, Intervals};
use crate::metric::{Dist, Metric};
use crate::plan::Load;
use crate::spec::{Spec, TemplateCost};

/// Version of the saved file's format; raised when a reader of the old one could misread the new one.
pub const SCHEMA_VERSION: u32 = 1;

/// Fewest values above a percentile for it to be shown without a mark.
pub const MIN_VALUES_ABOVE: f64 = 10.0;

/// A run's report. A saved file is this object with `raw_metrics`, the list of [`crate::record::Row`], added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`] of the writer.
    pub schema_version: u32,
    /// Whether the numbers below can be trusted.
    pub verdict: Verdict,
    /// What was asked for, defaults resolved.
    pub config: Config,
    /// The solved workload.
    pub spec: Spec,
    /// Content events before the first-chunk latency is taken.
    pub first_chunk_threshold: u32,
    /// Counts and lengths of the run.
    pub benchmark: Benchmark,
    /// Statistics of the measured phase.
    pub stats: Stats,
    /// Statistics of each turn, measured phase.
    pub per_turn: Vec<TurnStats>,
    /// The load asked for beside the load achieved.
    pub load: LoadReport,
    /// Hit rate planned, expected and reported.
    pub hit_rate: HitRates,
    /// How the replies arrived.
    #[serde(default)]
    pub stream: StreamReport,
    /// What benchd saw of itself and of its machine.
    #[serde(default)]
    pub client: ClientReport,
    /// What failed, by kind.
    pub failures: Failures,
    /// What was found out about the server before the load.
    pub preparation: Preparation,
    /// HdrHistogram V2 of each latency in microseconds, compressed, base64, by `<metric>_us`; mergeable.
    pub histograms: BTreeMap<String, String>,
    /// Where and by what the run was made.
    pub environment: Environment,
    /// What the server's own metrics say; absent in files of versions that did not ask for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<ServerReport>,
    /// Its metrics about once a second, from before the first request to after the last answer.
    #[serde(default)]
    pub server_samples: Vec<ServerSample>,
}

/// The run's configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Base URL, without user info.
    pub url: String,
    /// Model in use.
    pub model: String,
    /// Tokenizer in use: `builtin`, `server`, a path or a Hugging Face name.
    pub tokenizer: String,
    /// Digest of its file; absent for `server`.
    pub tokenizer_sha256: Option<String>,
    /// Load, with its `mode`.
    #[serde(flatten)]
    pub load: Load,
    /// Seed of prompts and arrivals.
    pub seed: u64,
    /// Seconds after which a request is a `timeout`.
    pub request_timeout_s: f64,
    /// Fields merged into every body.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra_body: Map<String, Value>,
}

/// Counts and lengths of a run. Requests are records: every slot and every turn, whatever became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Benchmark {
    /// Records.
    pub total_requests: u64,
    /// Of these, due before the measured part.
    pub warmup_requests: u64,
    /// Of these, due in the measured part.
    pub measured_requests: u64,
    /// Of these, due after it.
    pub drain_requests: u64,
    /// Failures in any phase.
    pub failed_requests: u64,
    /// Refused slots in any phase.
    pub refused_requests: u64,
    /// Requests that we ended, in any phase.
    pub aborted_requests: u64,
    /// From the first due instant to the last completion.
    pub duration_s: f64,
    /// Length of the measured part.
    pub measured_s: f64,
    /// Whether the run was stopped before its end.
    pub is_partial: bool,
    /// Whether it was stopped because more requests failed than the plan allows.
    #[serde(default)]
    pub error_limit_reached: bool,
    /// Closed loop: whether warm-up ended by the rule; absent for an open loop, whose warm-up is timed.
    pub steady_state_reached: Option<bool>,
    /// Whether the statistics are of all requests, because none was measured or steady state was not reached.
    pub statistics_of_all: bool,
}

/// Aggregates of the measured phase. Latencies are over successes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(into = "Map<String, Value>", try_from = "Map<String, Value>")]
pub struct Stats {
    /// `{avg,p50,p90,p95,p99,max}_<metric>_ms` and `count_<metric>`.
    pub dists: BTreeMap<Metric, Dist>,
    /// 95 % confidence intervals of [`INTERVAL_METRICS`], as `ci95_{low,high}_{avg,p50,p90,p95,p99}_<metric>_ms`.
    pub intervals: BTreeMap<Metric, Intervals>,
    /// Output tokens that arrived inside the measured part / its length.
    pub throughput_tok_s: Option<f64>,
    /// Prompt tokens of requests that completed inside it / its length.
    pub input_throughput_tok_s: Option<f64>,
    /// Successful completions inside it / its length.
    pub measured_request_rate: Option<f64>,
    /// Mean prompt tokens of successes.
    pub avg_input_tokens: Option<f64>,
    /// Mean output tokens of successes.
    pub avg_output_tokens: Option<f64>,
    /// Of these, mean tokens of reasoning, where the server tells them.
    pub avg_reasoning_tokens: Option<f64>,
    /// Failures / completions.
    pub error_rate: Option<f64>,
    /// Metrics whose values are too many to be held: their figures are a histogram's, of three digits. Absent in
    /// files when there is none.
    pub from_histogram: Vec<Metric>,
}

/// One turn's row of the report; latencies are over successes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "Map<String, Value>", try_from = "Map<String, Value>")]
pub struct TurnStats {
    /// From 1.
    pub turn: u32,
    /// Measured requests of this turn that succeeded.
    pub count: u64,
    /// Mean prompt tokens.
    pub avg_isl: Option<f64>,
    /// Of TTFT, FC, TPOT, ITL and latency; written as `{avg,p50,p99}_<metric>_ms`.
    pub dists: BTreeMap<Metric, Dist>,
}

/// The metrics of [`Stats`] that have confidence intervals.
pub const INTERVAL_METRICS: [Metric; 3] = [Metric::Ttft, Metric::Tpot, Metric::Latency];

/// The metrics of [`TurnStats`].
pub const TURN_METRICS: [Metric; 5] = [Metric::Ttft, Metric::Fc, Metric::Tpot, Metric::Itl, Metric::Latency];

/// The load asked for beside the load achieved; shares and rates are of the measured part unless they say other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Open loop: slots of the drawn schedule, whole run. Planned = sent + refused + unsent.
    pub planned_slots: Option<u64>,
    /// Requests sent, whole run.
    pub sent: u64,
    /// Slots refused, whole run.
    pub refused: u64,
    /// Slots that still waited for a place when the run ended.
    pub unsent: u64,
    /// Measured requests that were still unanswered when the run ended, and that we ended with it.
    #[serde(default)]
    pub unanswered: u64,
    /// Open loop: slots a second asked for.
    pub asked_rate_per_s: Option<f64>,
    /// Slots of the drawn schedule due in the measured part / its length.
    pub planned_rate_per_s: Option<f64>,
    /// Requests sent inside the measured part / its length.
    pub sent_rate_per_s: Option<f64>,
    /// Mean prompt tokens of the plan, over the turns that were sent.
    pub planned_isl: Option<f64>,
    /// Mean prompt tokens as counted.
    pub achieved_isl: Option<f64>,
    /// Output tokens of the plan.
    pub planned_osl: f64,
    /// Mean output tokens as counted.
    pub achieved_osl: Option<f64>,
    /// Requests whose prompt tokens, as the server counted them, equal the plan's.
    pub exact_prompts: u64,
    /// Requests whose prompt tokens differ, by difference (counted − planned).
    pub residuals: BTreeMap<i64, u64>,
    /// Requests sent whose prompt tokens the server did not tell.
    pub uncounted_prompts: u64,
    /// Share of each turn among the requests sent.
    pub turn_mix: Vec<TurnShare>,
    /// Sessions started, whole run.
    pub sessions_started: u64,
    /// Sessions that ran to their last turn.
    pub sessions_completed: u64,
    /// Sessions that ended with a failed turn.
    pub sessions_failed: u64,
    /// Open loop: sessions started because no ready turn was there, in the measured part.
    pub sessions_beyond_plan: u64,
    /// Open loop: sessions ended because too many waited for the same turn, in the measured part.
    pub sessions_cut_short: u64,
    /// Open loop: time between a turn being ready and its slot.
    pub ready_wait_ms: WaitDist,
    /// Requests in flight, mean over the measured part.
    pub mean_in_flight: Option<f64>,
    /// Most requests in flight, whole run.
    pub peak_in_flight: u64,
    /// Least-squares slope of the requests in flight over the measured part; well above 0: the server falls behind.
    pub in_flight_growth_per_s: Option<f64>,
    /// Turns that waited for a prompt that was not made in time.
    pub prompt_supply_dry: u64,
    /// Measured requests for which a connection was made.
    pub new_connections: u64,
    /// Requests sent again because a kept connection turned out to be closed.
    pub resent: u64,
}

/// Mean and tail of a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WaitDist {
    /// Waits.
    pub count: u64,
    /// Mean.
    pub avg: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
}

/// A turn's share of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnShare {
    /// From 1.
    pub turn: u32,
    /// Requests of that turn sent in the measured part.
    pub sent: u64,
    /// Share aimed at.
    pub planned: f64,
    /// Share achieved.
    pub achieved: Option<f64>,
}

/// Token-weighted hit rates of the measured part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HitRates {
    /// Of the plan, over the turns that were sent, for an ideal cache.
    pub planned: Option<f64>,
    /// Of the plan, over the turns that were sent, for a cache of whole blocks.
    pub planned_by_blocks: Option<f64>,
    /// Recomputed from the replies as they came, for an ideal cache.
    pub expected: Option<f64>,
    /// Recomputed from the replies as they came, for a cache of whole blocks.
    pub expected_by_blocks: Option<f64>,
    /// By `usage.prompt_tokens_details.cached_tokens`.
    pub reported: Option<f64>,
    /// Why `reported` is absent.
    pub reported_missing: Option<String>,
    /// Requests that the reported rate is made of.
    pub reported_requests: u64,
    /// Reported cached tokens of first turns beyond the shared part / prompt tokens of first turns: above 1 %,
    /// the server already held these prompts.
    pub first_turn_unexpected: Option<f64>,
    /// By the server's own counters: found / looked up in the prefix cache between two scrapes, the first at or after
    /// the start of the measured part, the last after its last request completed.
    #[serde(default)]
    pub counted: Option<f64>,
    /// Why `counted` is absent.
    #[serde(default)]
    pub counted_missing: Option<String>,
    /// Instant of the first scrape of `counted`, from the run's origin.
    #[serde(default)]
    pub counted_from_ms: Option<f64>,
    /// Instant of the last scrape of `counted`.
    #[serde(default)]
    pub counted_to_ms: Option<f64>,
    /// The same from before the first request to after the last answer of the whole run.
    #[serde(default)]
    pub counted_whole_run: Option<f64>,
    /// As `reported`, over all answers of the whole run: of the same requests as `counted_whole_run`.
    #[serde(default)]
    pub reported_whole_run: Option<f64>,
}

/// Whose names a server's metrics have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerKind {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// llama.cpp.
    Llamacpp,
}

/// What the server's own metrics say of a run. All of its traffic is in them, ours and others'.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerReport {
    /// Where they were asked for; absent when that was switched off.
    pub metrics_url: Option<String>,
    /// Whose names they have.
    pub kind: Option<ServerKind>,
    /// Why there are none.
    pub missing: Option<String>,
    /// Scrapes that gave a sample.
    pub scrapes: u64,
    /// Scrapes that gave none.
    pub failed_scrapes: u64,
    /// Why the last of these did not, secrets removed.
    pub last_failure: Option<String>,
    /// Over the measured part, as `counted` in [`HitRates`]; over the whole run where that has no measured part.
    pub window: Option<ServerWindow>,
    /// From before the first request to after the last answer.
    pub whole_run: Option<ServerChange>,
    /// Prompt tokens of all our requests by usage, to be compared with those of `whole_run`.
    pub own_prompt_tokens: u64,
    /// Cached prompt tokens of all our requests by usage; absent when no answer told any.
    pub own_cached_tokens: Option<u64>,
}

/// The server over a part of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerWindow {
    /// What its counters counted.
    #[serde(flatten)]
    pub change: ServerChange,
    /// Samples in it.
    pub samples: u64,
    /// Requests in the running batch.
    pub running: GaugeStats,
    /// Requests waiting.
    pub waiting: GaugeStats,
    /// Share of the KV cache in use by requests, 0 to 1.
    pub kv_cache_usage: GaugeStats,
    /// Our requests whose first token came in this time.
    pub client_ttft_count: u64,
    /// Their mean TTFT, from sent: what it has beyond the server's is the network's, the client's, and the server's
    /// own before its clock starts.
    pub client_avg_ttft_ms: Option<f64>,
}

/// What a server's counters counted between two scrapes; what it does not count is absent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerChange {
    /// First scrape, from the run's origin; negative before it.
    pub from_ms: f64,
    /// Last scrape.
    pub to_ms: f64,
    /// Prompt tokens, cached ones included.
    pub prompt_tokens: Option<u64>,
    /// Output tokens.
    pub generation_tokens: Option<u64>,
    /// Prompt tokens looked up in the prefix cache.
    pub cache_queries: Option<u64>,
    /// Of these, found there.
    pub cache_hits: Option<u64>,
    /// Requests whose time to first token was taken.
    pub ttft_count: Option<u64>,
    /// Their mean, by the server's clock.
    pub avg_ttft_ms: Option<f64>,
}

/// A gauge over some samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GaugeStats {
    /// Mean over the samples.
    pub mean: Option<f64>,
    /// Largest.
    pub max: Option<f64>,
}

/// One scrape of the server's metrics, summed over its engines; what it does not tell is absent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerSample {
    /// When it was asked for, from the run's origin; negative before it.
    pub at_ms: f64,
    /// Requests in the running batch.
    pub running: Option<f64>,
    /// Requests waiting.
    pub waiting: Option<f64>,
    /// Share of the KV cache in use by requests, mean over the engines, 0 to 1.
    pub kv_cache_usage: Option<f64>,
    /// Prompt tokens since the server started, cached ones included.
    pub prompt_tokens: Option<u64>,
    /// Output tokens since then.
    pub generation_tokens: Option<u64>,
    /// Prompt tokens looked up in the prefix cache since then.
    pub cache_queries: Option<u64>,
    /// Of these, found there.
    pub cache_hits: Option<u64>,
    /// Requests whose time to first token was taken since then.
    pub ttft_count: Option<u64>,
    /// Sum of their times.
    pub ttft_sum_s: Option<f64>,
}

/// How the replies of the measured part arrived; of successes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StreamReport {
    /// Output tokens / content events: above 1 with speculative decoding or chunked emission.
    pub tokens_per_event: Option<f64>,
    /// Content events / reads of the connection that brought some.
    pub events_per_read: Option<f64>,
    /// Share of the content events that came together with the one before (see [`crate::metric::burst_gaps`]).
    pub burst_share: Option<f64>,
    /// Whether that share is so large ([`MAX_BURST_SHARE`]) that gaps between events are the path's and not the
    /// model's.
    pub is_bursty: bool,
    /// Answers that came whole, although a stream was asked for: their TTFT is their latency.
    #[serde(default)]
    pub whole_answers: u64,
}

/// Share of events that come together with another above which a stream counts as bursty.
pub const MAX_BURST_SHARE: f64 = 0.2;

/// What benchd saw of itself and of its machine, over the measured part. What the system does not tell is absent, and
/// so is CPU for parts of under a second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientReport {
    /// Times at which a thread of the runtime came back more than 10 ms late to what waited for it.
    pub stalls: u64,
    /// The longest of them.
    pub longest_stall_ms: Option<f64>,
    /// Requests that were in flight during one.
    pub requests_in_stalls: u64,
    /// Cores that benchd kept busy, on average.
    pub process_cores: Option<f64>,
    /// Its busiest thread.
    pub busiest_thread: Option<String>,
    /// Share of a core that this thread kept busy.
    pub busiest_thread_cores: Option<f64>,
    /// Share of the machine's CPU time that its host gave to others.
    pub stolen_share: Option<f64>,
    /// Share of the time in which benchd's control group was throttled.
    pub throttled_share: Option<f64>,
}

/// What failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Failures {
    /// Failures in any phase.
    pub total: u64,
    /// By kind and status, most frequent first.
    pub kinds: Vec<FailureKind>,
}

/// One kind of failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailureKind {
    /// Name of the outcome.
    pub outcome: String,
    /// Status of an `http_status`.
    pub http_status: Option<u16>,
    /// How many.
    pub count: u64,
    /// count / completions, any phase.
    pub rate: f64,
    /// Up to three texts, secrets removed.
    pub samples: Vec<String>,
}

/// Whether the numbers can be trusted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The answer.
    pub trust: Trust,
    /// Why it is suspect; empty when valid.
    pub reasons: Vec<Reason>,
}

/// The answer of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trust {
    /// No reason against it.
    Valid,
    /// Some reason against it.
    Suspect,
}

/// A reason not to trust the numbers as they stand.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reason {
    /// Whose doing it is.
    pub kind: ReasonKind,
    /// Stable name, for scripts.
    pub code: String,
    /// One sentence with the figure and the bound.
    pub text: String,
}

/// Whose doing a reason is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasonKind {
    /// The load generator or its machine was late.
    Client,
    /// The load was not the one asked for.
    Load,
    /// The server failed or was not steady.
    Server,
}

/// What was found out before the load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Preparation {
    /// Request parameters that the server refused, and what was done.
    pub dropped_parameters: Vec<String>,
    /// The chat template's cost; absent: the server sends no usage, and the template was not counted.
    pub template: Option<TemplateCost>,
    /// The calibration requests, outside every phase.
    pub calibration: Vec<CalibrationRequest>,
    /// Things a reader should know, a sentence each.
    pub notices: Vec<String>,
}

/// One request made before the load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationRequest {
    /// `probe` or `calibration`.
    pub purpose: String,
    /// User messages.
    pub turns: u32,
    /// Whether there was a system message.
    pub with_system: bool,
    /// Tokens of all contents, by the tokenizer; absent with none loaded.
    pub content_tokens: Option<u32>,
    /// Prompt tokens by usage.
    pub prompt_tokens: Option<u32>,
    /// Cached tokens by usage.
    pub cached_tokens: Option<u32>,
    /// HTTP status.
    pub status: u16,
}

/// Where and by what a run was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Version of benchd.
    pub benchd_version: String,
    /// [`crate::wire::PROTOCOL_VERSION`].
    pub protocol_version: u32,
    /// Host name.
    pub host: String,
    /// Operating system and its release.
    pub os: String,
    /// Processors available to benchd.
    pub cpus: u32,
    /// benchctl's command line, secrets removed.
    pub command_line: Vec<String>,
    /// Seed of prompts and arrivals.
    pub seed: u64,
    /// Digest of everything that fixes the planned messages and due instants.
    pub plan_hash: String,
    /// Start of the run, in seconds of the Unix epoch.
    pub started_at_epoch_s: f64,
    /// The run's origin on the machine's monotonic clock, for joining with other logs of the same machine.
    pub origin_monotonic_ns: i64,
}

/// Answer of `smoke`: one small request, and what the server can do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SmokeReport {
    /// Base URL.
    pub url: String,
    /// Model asked.
    pub model: String,
    /// Models that the server lists; absent when it lists none.
    pub models: Option<Vec<String>>,
    /// First token − sent.
    pub ttft_ms: Option<f64>,
    /// Last token − sent.
    pub latency_ms: Option<f64>,
    /// Prompt tokens by usage.
    pub input_tokens: Option<u32>,
    /// Output tokens by usage, else content events.
    pub output_tokens: Option<u32>,
    /// Beginning of the reply.
    pub reply: String,
    /// Whether usage came with the stream.
    pub has_usage: bool,
    /// Whether usage told cached tokens.
    pub has_cached_tokens: bool,
    /// Whether `/metrics` answered in names that the report of a run knows: vLLM's, SGLang's or llama.cpp's.
    pub has_metrics: bool,
    /// Whether `/tokenize` answered.
    pub has_tokenize: bool,
    /// Parameters refused, and what was done.
    pub dropped_parameters: Vec<String>,
}

const ALL_STATS: [&str; 6] = ["avg", "p50", "p90", "p95", "p99", "max"];
const TURN_STATS: [&str; 3] = ["avg", "p50", "p99"];

fn stat(dist: &Dist, name: &str) -> Option<f64> {
    match name {
        "avg" => dist.avg,
        "p50" => dist.p50,
        "p90" => dist.p90,
        "p95" => dist.p95,
        "p99" => dist.p99,
        _ => dist.max,
    }
}

fn set_stat(dist: &mut Dist, name: &str, value: Option<f64>) {
    match name {
        "avg" => dist.avg = value,
        "p50" => dist.p50 = value,
        "p90" => dist.p90 = value,
        "p95" => dist.p95 = value,
        "p99" => dist.p99 = value,
        _ => dist.max = value,
    }
}

fn write_dist(out: &mut Map<String, Value>, metric: Metric, dist: &Dist, stats: &[&str]) {
    for name in stats {
        out.insert(format!("{name}_{}_ms", metric.name()), stat(dist, name).into());
    }
    out.insert(format!("count_{}", metric.name()), dist.count.into());
}

fn read_dists(from: &Map<String, Value>, stats: &[&str]) -> BTreeMap<Metric, Dist> {
    let mut dists = BTreeMap::new();
    for metric in Metric::ALL {
        let Some(count) = from.get(&format!("count_{}", metric.name())).and_then(Value::as_u64) else {
            continue;
        };
        let mut dist = Dist { count, ..Dist::default() };
        for name in stats {
            let value = from.get(&format!("{name}_{}_ms", metric.name())).and_then(Value::as_f64);
            set_stat(&mut dist, name, value);
        }
        dists.insert(metric, dist);
    }
    dists
}

fn interval_fields(intervals: &mut Intervals) -> [(&'static str, &mut Option<Interval>); 5] {
    let Intervals { avg, p50, p90, p95, p99 } = intervals;
    [("avg", avg), ("p50", p50), ("p90", p90), ("p95", p95), ("p99", p99)]
}

fn end_names(stat: &str, metric: Metric) -> (String, String) {
    let name = metric.name();
    (format!("ci95_low_{stat}_{name}_ms"), format!("ci95_high_{stat}_{name}_ms"))
}

fn write_intervals(out: &mut Map<String, Value>, metric: Metric, mut intervals: Intervals) {
    for (stat, interval) in interval_fields(&mut intervals) {
        let (low, high) = end_names(stat, metric);
        out.insert(low, interval.map(|i| i.low).into());
        out.insert(high, interval.map(|i| i.high).into());
    }
}

/// Files of older versions have no intervals at all.
fn read_intervals(from: &Map<String, Value>) -> BTreeMap<Metric, Intervals> {
    let mut all = BTreeMap::new();
    for metric in Metric::ALL {
        if !from.contains_key(&end_names("avg", metric).0) {
            continue;
        }
        let mut intervals = Intervals::default();
        for (stat, interval) in interval_fields(&mut intervals) {
            let (low, high) = end_names(stat, metric);
            let end = |name: &str| from.get(name).and_then(Value::as_f64);
            *interval = end(&low).zip(end(&high)).map(|(low, high)| Interval { low, high });
        }
        all.insert(metric, intervals);
    }
    all
}

impl From<Stats> for Map<String, Value> {
    fn from(stats: Stats) -> Self {
        let mut out = Map::new();
        for (metric, dist) in &stats.dists {
            write_dist(&mut out, *metric, dist, &ALL_STATS);
        }
        for (metric, intervals) in &stats.intervals {
            write_intervals(&mut out, *metric, *intervals);
        }
        out.insert("throughput_tok_s".into(), stats.throughput_tok_s.into());
        out.insert("input_throughput_tok_s".into(), stats.input_throughput_tok_s.into());
        out.insert("measured_request_rate".into(), stats.measured_request_rate.into());
        out.insert("avg_input_tokens".into(), stats.avg_input_tokens.into());
        out.insert("avg_output_tokens".into(), stats.avg_output_tokens.into());
        out.insert("avg_reasoning_tokens".into(), stats.avg_reasoning_tokens.into());
        out.insert("error_rate".into(), stats.error_rate.into());
        if !stats.from_histogram.is_empty() {
            let names: Vec<&str> = stats.from_histogram.iter().map(|m| m.name()).collect();
            out.insert("from_histogram".into(), names.into());
        }
        out
    }
}

impl TryFrom<Map<String, Value>> for Stats {
    type Error = String;
    fn try_from(from: Map<String, Value>) -> Result<Self, String> {
        let float = |name: &str| from.get(name).and_then(Value::as_f64);
        Ok(Stats {
            dists: read_dists(&from, &ALL_STATS),
            intervals: read_intervals(&from),
            throughput_tok_s: float("throughput_tok_s"),
            input_throughput_tok_s: float("input_throughput_tok_s"),
            measured_request_rate: float("measured_request_rate"),
            avg_input_tokens: float("avg_input_tokens"),
            avg_output_tokens: float("avg_output_tokens"),
            avg_reasoning_tokens: float("avg_reasoning_tokens"),
            error_rate: float("error_rate"),
            from_histogram: match from.get("from_histogram") {
                Some(names) => Vec::deserialize(names).map_err(|e| format!("from_histogram: {e}"))?,
                None => Vec::new(),
            },
        })
    }
}

impl From<TurnStats> for Map<String, Value> {
    fn from(row: TurnStats) -> Self {
        let mut out = Map::new();
        out.insert("turn".into(), row.turn.into());
        out.insert("count".into(), row.count.into());
        out.insert("avg_isl".into(), row.avg_isl.into());
        for (metric, dist) in &row.dists {
            write_dist(&mut out, *metric, dist, &TURN_STATS);
        }
        out
    }
}

impl TryFrom<Map<String, Value>> for TurnStats {
    type Error = String;
    fn try_from(from: Map<String, Value>) -> Result<Self, String> {
        let whole = |name: &str| {
            from.get(name).and_then(Value::as_u64).ok_or_else(|| format!("a row of per_turn has no {name}"))
        };
        Ok(TurnStats {
            turn: u32::try_from(whole("turn")?).map_err(|e| format!("turn: {e}"))?,
            count: whole("count")?,
            avg_isl: from.get("avg_isl").and_then(Value::as_f64),
            dists: read_dists(&from, &TURN_STATS),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_are_flat_and_come_back() {
        let mut stats = Stats { throughput_tok_s: Some(12.5), ..Stats::default() };
        stats.dists.insert(Metric::Ttft, Dist::of(vec![1.0, 2.0, 3.0]));
        stats.dists.insert(Metric::Fc, Dist::default());
        let avg = Some(Interval { low: 1.5, high: 2.75 });
        stats.intervals.insert(Metric::Ttft, Intervals { avg, ..Intervals::default() });
        let text = serde_json::to_string(&stats).unwrap();
        assert!(text.contains(r#""p50_ttft_ms":2.0"#) && text.contains(r#""count_fc":0"#), "{text}");
        assert!(text.contains(r#""avg_fc_ms":null"#), "missing is null, never 0: {text}");
        let ends = r#""ci95_low_avg_ttft_ms":1.5,"ci95_high_avg_ttft_ms":2.75,"ci95_low_p50_ttft_ms":null"#;
        for field in ends.split(',') {
            assert!(text.contains(field), "{field}: {text}");
        }
        assert_eq!(serde_json::from_str::<Stats>(&text).unwrap(), stats);
    }
}
