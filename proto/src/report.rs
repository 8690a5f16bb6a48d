//! The report of a run: what was asked, what came of it, and how far it can be trusted. Made by the engine from
//! records, rendered by benchctl, saved with the records as `raw_metrics`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::plan::Load;
use crate::spec::{Spec, TemplateCost};

pub use crate::stats::{INTERVAL_METRICS, Stats, TURN_METRICS, TurnStats};

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
    /// How many in each phase, by its name; phases without one are left out.
    #[serde(default)]
    pub by_phase: BTreeMap<String, u64>,
    /// How many of each turn; turns without one are left out.
    #[serde(default)]
    pub by_turn: BTreeMap<u32, u64>,
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
