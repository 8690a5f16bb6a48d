//! Whether a run's numbers can be trusted: figures against bounds, one reason for each that is crossed. Pure; every
//! bound of it is a constant below.

use proto::metric::Metric;
use proto::plan::Load;
use proto::report::{
    Benchmark, ClientReport, HitRates, LoadReport, Reason, ReasonKind, Stats, StreamReport, Trust, Verdict,
};
use proto::spec::Spec;

use crate::engine::summary::{Drift, Growth};

/// The client's own lateness, 99th percentile, in ms: below this it is in no figure that anyone reads.
const MAX_DISPATCH_LAG_P99_MS: f64 = 1.0;
/// The same as a share of the spacing of slots, or of a session's requests in a closed loop; the larger of the two
/// holds.
const MAX_DISPATCH_LAG_SPACING: f64 = 0.01;
/// Requests that were in flight while a thread of ours stalled, as a share of those sent.
const MAX_REQUESTS_IN_STALLS: f64 = 0.005;
/// Share of a core that our busiest thread keeps busy: beyond, requests queue for it.
const MAX_THREAD_CORES: f64 = 0.8;
/// Share of the machine's CPU time that its host may give to others.
const MAX_STOLEN: f64 = 0.01;
/// Share of the time in which our control group may be throttled.
const MAX_THROTTLED: f64 = 0.01;
/// Slots sent off from slots planned.
const MAX_SLOTS_OFF: f64 = 0.01;
/// Share of a turn, or hit rate, off from the one asked for.
const MAX_SHARE_OFF: f64 = 0.02;
/// Mean input or output tokens off from those asked for.
const MAX_TOKENS_OFF: f64 = 0.02;
/// Requests from which on shares and mean lengths are judged; with fewer, chance alone moves them as far.
const MIN_REQUESTS: u64 = 200;
/// Sessions beyond plan in the measured part, as a share of its slots.
const MAX_BEYOND_PLAN: f64 = 0.02;
/// Cached tokens of first turns that this run cannot have left, as a share of these turns' tokens.
const MAX_FIRST_TURN_UNEXPECTED: f64 = 0.01;
/// Failures as a share of completions.
const MAX_ERROR_RATE: f64 = 0.01;
/// Requests that were still unanswered when the run ended, as a share of those sent.
const MAX_UNANSWERED: f64 = 0.005;
/// Answers that were no stream, as a share of the requests sent.
const MAX_WHOLE_ANSWERS: f64 = 0.005;
/// Growth or decline of the queue a second, as a share of the rate asked for; growth also in the second half alone.
const MAX_QUEUE_GROWTH: f64 = 0.02;
/// The same over the whole part, in roots of its mean, which is what arrivals at random cause by themselves, where
/// answers grow slower or quicker too, …
const MIN_QUEUE_GROWTH_ROOTS: f64 = 3.0;
/// … and where they do not, or where there are none: then the queue must say it all.
const MIN_QUEUE_GROWTH_ROOTS_ALONE: f64 = 10.0;
/// Share of the wait that the queue's growth is at the rate asked for, by which answers must grow slower to count.
const MIN_WAIT_OF_GROWTH: f64 = 0.5;
/// Share of that growth that the second half must show.
const MIN_LATE_GROWTH: f64 = 2.0 / 3.0;
/// A trend, in standard deviations of one that is none (1 %, one-sided).
const MIN_TREND_Z: f64 = 2.33;
/// Added to (n − 1)·(latency + think time) for the warm-up that an open loop needs, in seconds.
const WARM_UP_MARGIN_S: f64 = 2.0;

/// What a verdict is made of.
pub struct Evidence<'a> {
    /// The solved workload.
    pub spec: &'a Spec,
    /// The load asked for.
    pub asked: &'a Load,
    /// Counts of the run.
    pub benchmark: &'a Benchmark,
    /// Its statistics.
    pub stats: &'a Stats,
    /// The load achieved.
    pub load: &'a LoadReport,
    /// Its hit rates.
    pub hit_rate: &'a HitRates,
    /// How the replies arrived.
    pub stream: &'a StreamReport,
    /// What was seen of ourselves.
    pub client: &'a ClientReport,
    /// Open loop: whether a last turn was sent before warm-up ended.
    pub last_turn_sent_in_warm_up: Option<bool>,
    /// Open loop: slots of the drawn schedule due in the measured part.
    pub planned_slots_measured: Option<u64>,
    /// Trend of the queue.
    pub growth: Option<Growth>,
}

/// Judges.
pub fn verdict(evidence: &Evidence<'_>) -> Verdict {
    let mut reasons = Reasons(Vec::new());
    evidence.judge_run(&mut reasons);
    evidence.judge_client(&mut reasons);
    evidence.judge_machine(&mut reasons);
    evidence.judge_load(&mut reasons);
    evidence.judge_conversations(&mut reasons);
    evidence.judge_server(&mut reasons);
    // Whoever reads the first reason only shall read about the client first: nothing else is right without it.
    reasons.0.sort_by_key(|reason| reason.kind);
    let trust = if reasons.0.is_empty() { Trust::Valid } else { Trust::Suspect };
    Verdict { trust, reasons: reasons.0 }
}

struct Reasons(Vec<Reason>);

impl Reasons {
    fn add(&mut self, kind: ReasonKind, code: &str, text: String) {
        self.0.push(Reason { kind, code: code.to_owned(), text });
    }
}

impl Evidence<'_> {
    fn judge_run(&self, reasons: &mut Reasons) {
        if self.benchmark.is_partial {
            let why =
                if self.benchmark.error_limit_reached { ", because too many requests failed" } else { "" };
            let text =
                format!("the run was stopped after {:.1} s, before its end{why}", self.benchmark.duration_s);
            reasons.add(ReasonKind::Load, "partial", text);
        }
        if self.benchmark.total_requests == 0 {
            reasons.add(ReasonKind::Load, "nothing_sent", "no request was sent".to_owned());
        } else if self.benchmark.steady_state_reached == Some(false) {
            let text = "steady state was never reached, so the statistics are of all requests, warm-up and drain too; \
                        use more sessions or a longer duration"
                .to_owned();
            reasons.add(ReasonKind::Load, "no_steady_state", text);
        } else if self.benchmark.statistics_of_all {
            let text =
                "no request fell into the measured part, so the statistics are of all requests; use more \
                        sessions or a longer duration"
                    .to_owned();
            reasons.add(ReasonKind::Load, "nothing_measured", text);
        }
        let latency_s = self.stats.dists.get(&Metric::Latency).and_then(|d| d.avg).map(|ms| ms / 1000.0);
        let measured_s = self.benchmark.measured_s;
        if let Some(latency_s) = latency_s.filter(|l| !self.benchmark.statistics_of_all && measured_s < *l) {
            let text = format!(
                "the measured part took {measured_s:.2} s, less than one request ({latency_s:.2} s): rates say nothing; \
                 use more sessions, more requests or a longer duration"
            );
            reasons.add(ReasonKind::Load, "too_short", text);
        }
        if self.last_turn_sent_in_warm_up == Some(false) {
            // With a server that falls behind, no warm-up is long enough.
            let latency_s = latency_s.filter(|_| !self.is_falling_behind());
            let needed = latency_s.map_or(String::new(), |latency_s| {
                let steps = f64::from(self.spec.num_turns.saturating_sub(1));
                let needed_s = steps * (latency_s + self.spec.think_time_s) + WARM_UP_MARGIN_S;
                format!("; use --warm-up {:.0} or more", needed_s.ceil())
            });
            let text = format!(
                "no turn {} was sent before the warm-up ended: the mix of turns was still building up{needed}",
                self.spec.num_turns
            );
            reasons.add(ReasonKind::Load, "warm_up_too_short", text);
        }
    }

    fn judge_client(&self, reasons: &mut Reasons) {
        let spacing_ms = match self.asked {
            Load::Open { request_rate_per_s, .. } => 1000.0 / request_rate_per_s,
            // A session's requests follow each other by an answer and its think time.
            Load::Closed { .. } => {
                let latency_ms = self.stats.dists.get(&Metric::Latency).and_then(|d| d.avg).unwrap_or(0.0);
                latency_ms + self.spec.think_time_s * 1000.0
            }
        };
        let bound_ms = MAX_DISPATCH_LAG_P99_MS.max(spacing_ms * MAX_DISPATCH_LAG_SPACING);
        let lag = self.stats.dists.get(&Metric::DispatchLag).and_then(|d| d.p99);
        if let Some(lag_ms) = lag.filter(|lag| *lag > bound_ms) {
            let text = format!(
                "benchd itself sent late: p99 of the dispatch lag is {lag_ms:.2} ms, above {bound_ms:.2} ms; the machine \
                 is too busy or too small for this load"
            );
            reasons.add(ReasonKind::Client, "dispatch_lag", text);
        }
        if self.load.prompt_supply_dry > 0 {
            let text = format!(
                "{} requests waited for a prompt that was not made in time; use more --num-workers or a lower load",
                self.load.prompt_supply_dry
            );
            reasons.add(ReasonKind::Client, "prompt_supply_dry", text);
        }
    }

    /// Whether we, or our machine, were too slow to see things when they happened.
    fn judge_machine(&self, reasons: &mut Reasons) {
        let client = self.client;
        let sent: u64 = self.load.turn_mix.iter().map(|t| t.sent).sum();
        if client.requests_in_stalls as f64 > sent as f64 * MAX_REQUESTS_IN_STALLS {
            let text = format!(
                "benchd was held up {} times for more than 10 ms, the longest for {:.0} ms, with {} of {sent} requests in \
                 flight: their latencies contain it",
                client.stalls,
                client.longest_stall_ms.unwrap_or(0.0),
                client.requests_in_stalls
            );
            reasons.add(ReasonKind::Client, "stalls", text);
        }
        if let Some(cores) = client.busiest_thread_cores.filter(|cores| *cores > MAX_THREAD_CORES) {
            let text = format!(
                "benchd's thread {} was busy for {} of the time: it is near its limit; use a lower load, or several benchd",
                client.busiest_thread.as_deref().unwrap_or_default(),
                percent(cores)
            );
            reasons.add(ReasonKind::Client, "thread_busy", text);
        }
        if let Some(share) = client.stolen_share.filter(|share| *share > MAX_STOLEN) {
            let text = format!("the host gave {} of this machine's CPU time to others", percent(share));
            reasons.add(ReasonKind::Client, "cpu_stolen", text);
        }
        if let Some(share) = client.throttled_share.filter(|share| *share > MAX_THROTTLED) {
            let text = format!(
                "benchd was throttled for {} of the time by its CPU limit; raise it, or lower the load",
                percent(share)
            );
            reasons.add(ReasonKind::Client, "cpu_throttled", text);
        }
    }

    fn judge_load(&self, reasons: &mut Reasons) {
        if let (Some(planned), Some(planned_rate), Some(sent_rate), false) = (
            self.planned_slots_measured,
            self.load.planned_rate_per_s,
            self.load.sent_rate_per_s,
            self.benchmark.statistics_of_all,
        ) {
            let off = (sent_rate - planned_rate).abs() * self.benchmark.measured_s;
            // A slot at either end may fall to the other side by a microsecond.
            if off > (planned as f64 * MAX_SLOTS_OFF).max(1.5) {
                let text = format!(
                    "{sent_rate:.2} requests a second were sent where the schedule had {planned_rate:.2}, {} off",
                    percent(off / planned as f64)
                );
                reasons.add(ReasonKind::Load, "rate_off", text);
            }
            let beyond = self.load.sessions_beyond_plan;
            if beyond as f64 > planned as f64 * MAX_BEYOND_PLAN {
                let text = format!(
                    "{beyond} sessions were started beyond plan in {planned} slots, because no turn was ready: the server \
                     is too slow for the rate, or the warm-up too short"
                );
                reasons.add(ReasonKind::Load, "beyond_plan", text);
            }
        }
        if self.load.refused > 0 {
            let text = format!(
                "{} slots were refused at --max-in-flight: the server was offered less than the rate",
                self.load.refused
            );
            reasons.add(ReasonKind::Load, "refused", text);
        }
        if let Some(share) = self.hit_rate.first_turn_unexpected.filter(|s| *s > MAX_FIRST_TURN_UNEXPECTED) {
            let text = format!(
                "the server already held {} of the first turns' prompts in its cache: an earlier run had the same seed; \
                 use another --seed, or none",
                percent(share)
            );
            reasons.add(ReasonKind::Load, "already_cached", text);
        }
    }

    /// The turn mix, the lengths and the hit rate against the workload asked for.
    fn judge_conversations(&self, reasons: &mut Reasons) {
        let sent: u64 = self.load.turn_mix.iter().map(|t| t.sent).sum();
        if sent < MIN_REQUESTS {
            return;
        }
        let worst = self
            .load
            .turn_mix
            .iter()
            .filter_map(|t| Some((t.turn, t.planned, t.achieved?)))
            .max_by(|a, b| (a.1 - a.2).abs().total_cmp(&(b.1 - b.2).abs()));
        if let Some((turn, planned, achieved)) = worst
            && (achieved - planned).abs() > MAX_SHARE_OFF
        {
            let text = format!(
                "turn {turn} was {} of the requests where the plan has {}",
                percent(achieved),
                percent(planned)
            );
            reasons.add(ReasonKind::Load, "turn_mix", text);
        }
        let mut length = |code: &str, what: &str, planned: f64, achieved: Option<f64>| {
            if let Some(achieved) = achieved.filter(|a| (a - planned).abs() > planned * MAX_TOKENS_OFF) {
                let text = format!(
                    "{what} tokens were {achieved:.1} on average where {planned:.1} were asked for, {} off",
                    percent((achieved - planned).abs() / planned)
                );
                reasons.add(ReasonKind::Load, code, text);
            }
        };
        length("input_length", "input", self.spec.effective_isl, self.load.achieved_isl);
        length("output_length", "output", self.load.planned_osl, self.load.achieved_osl);
        let target = self.spec.effective_hit_rate;
        if let Some(expected) = self.hit_rate.expected.or(self.hit_rate.planned)
            && (expected - target).abs() > MAX_SHARE_OFF
        {
            let text = format!(
                "the prompts sent allow a hit rate of {} where the plan has {}",
                percent(expected),
                percent(target)
            );
            reasons.add(ReasonKind::Load, "hit_rate", text);
        }
        // What the prompts allowed is judged above; here only whether the server's cache made use of it.
        let (Some(ideal), Some(by_blocks), Some(reported)) =
            (self.hit_rate.expected, self.hit_rate.expected_by_blocks, self.hit_rate.reported)
        else {
            return;
        };
        let why = if reported < ideal.min(by_blocks) - MAX_SHARE_OFF {
            "its cache is small or off, keeps larger blocks (--block-size), or replies tokenise to other tokens than \
             were generated"
        } else if reported > ideal + MAX_SHARE_OFF {
            "it held these prompts before"
        } else {
            return;
        };
        let text = format!(
            "the server reports a hit rate of {} where the prompts allow {} ({} by blocks of {}): {why}",
            percent(reported),
            percent(ideal),
            percent(by_blocks),
            self.spec.block_size
        );
        reasons.add(ReasonKind::Load, "hit_rate_reported", text);
    }

    fn judge_server(&self, reasons: &mut Reasons) {
        let sent: u64 = self.load.turn_mix.iter().map(|t| t.sent).sum();
        // After a stop by hand they are no wonder.
        if !self.benchmark.is_partial && self.load.unanswered as f64 > sent as f64 * MAX_UNANSWERED {
            let text = format!(
                "{} of {sent} requests were still unanswered when the run ended (--drain-timeout): the longest latencies \
                 are missing",
                self.load.unanswered
            );
            reasons.add(ReasonKind::Server, "unanswered", text);
        }
        let whole = self.stream.whole_answers;
        if whole as f64 > sent as f64 * MAX_WHOLE_ANSWERS {
            let text = format!(
                "{whole} answers came whole although a stream was asked for: their TTFT is their latency, and there is no \
                 TPOT"
            );
            reasons.add(ReasonKind::Server, "not_streamed", text);
        }
        let successes = self.stats.dists.get(&Metric::Latency).map_or(0, |d| d.count);
        if sent > 0 && successes == 0 && !self.benchmark.statistics_of_all {
            let text =
                "no request of the measured part was answered with tokens: there are no latencies".to_owned();
            reasons.add(ReasonKind::Server, "nothing_answered", text);
        }
        if let Some(rate) = self.stats.error_rate.filter(|rate| *rate > MAX_ERROR_RATE) {
            let text = format!("{} of the requests failed", percent(rate));
            reasons.add(ReasonKind::Server, "errors", text);
        }
        let (Some((trend, rate_per_s)), Some(growth)) = (self.queue_trend(), self.growth) else { return };
        let change = growth.per_s.abs();
        let share = percent(change / rate_per_s);
        let text = match trend {
            QueueTrend::Rising => format!(
                "the server did not keep up: its queue grew by {change:.1} requests a second, {share} of the {rate_per_s:.1} \
                 that were due; latencies depend on how long the run is"
            ),
            QueueTrend::Falling => format!(
                "the server was still catching up: its queue shrank by {change:.1} requests a second, {share} of the \
                 {rate_per_s:.1} that were due; a longer --warm-up keeps what came before out of the latencies"
            ),
        };
        reasons.add(ReasonKind::Server, "not_steady", text);
    }

    /// Where the queue is going, and the rate that this is judged by. Only an open loop has a queue: in a closed one, what
    /// is in flight is what was asked for.
    fn queue_trend(&self) -> Option<(QueueTrend, f64)> {
        let Load::Open { request_rate_per_s, .. } = self.asked else { return None };
        Some((queue_trend(&self.growth?, *request_rate_per_s)?, *request_rate_per_s))
    }

    fn is_falling_behind(&self) -> bool {
        matches!(self.queue_trend(), Some((QueueTrend::Rising, _)))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum QueueTrend {
    Rising,
    Falling,
}

/// Where a queue is going, if it is going anywhere.
fn queue_trend(growth: &Growth, rate_per_s: f64) -> Option<QueueTrend> {
    let goes = |sign: f64| {
        // By Little's law, a longer queue is a longer wait; arrivals that come denser by chance make none.
        let wait_ms = growth.total * sign / rate_per_s * 1000.0 * MIN_WAIT_OF_GROWTH;
        let follows = |answers: Drift| answers.z * sign > MIN_TREND_Z && answers.total_ms * sign > wait_ms;
        let roots = if follows(growth.ttft) || follows(growth.latency) {
            MIN_QUEUE_GROWTH_ROOTS
        } else if growth.queue_z * sign > MIN_TREND_Z {
            MIN_QUEUE_GROWTH_ROOTS_ALONE
        } else {
            return None;
        };
        let (bound_per_s, bound) = (rate_per_s * MAX_QUEUE_GROWTH, roots * growth.mean.sqrt());
        (growth.per_s * sign > bound_per_s && growth.total * sign > bound).then_some((bound_per_s, bound))
    };
    if let Some((bound_per_s, bound)) = goes(1.0) {
        // A queue that only filled up to the server's latency has stopped growing by then.
        let grows_late = growth.late_per_s > bound_per_s && growth.late_total > bound * MIN_LATE_GROWTH;
        return grows_late.then_some(QueueTrend::Rising);
    }
    goes(-1.0).map(|_| QueueTrend::Falling)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue of 100 on average, at 50 requests a second.
    fn trend(per_s: f64, late_per_s: f64, total: f64, z: (f64, f64, f64)) -> Option<QueueTrend> {
        let (queue_z, ttft_z, latency_z) = z;
        let drift = |z| Drift { total_ms: total / 50.0 * 1000.0, z };
        let growth = Growth {
            per_s,
            late_per_s,
            total,
            late_total: late_per_s * 10.0,
            mean: 100.0,
            queue_z,
            ttft: drift(ttft_z),
            latency: drift(latency_z),
        };
        queue_trend(&growth, 50.0)
    }

    #[test]
    fn a_queue_goes_somewhere_when_it_changes_by_much_and_not_by_chance() {
        let sure = (6.0, 6.0, 6.0);
        assert_eq!(trend(20.0, 20.0, 400.0, sure), Some(QueueTrend::Rising));
        assert_eq!(trend(-20.0, 0.0, -400.0, (-6.0, -6.0, -6.0)), Some(QueueTrend::Falling));
        for (per_s, is_rising) in [(1.1, true), (0.9, false)] {
            assert_eq!(trend(per_s, 5.0, 400.0, sure).is_some(), is_rising, "a fiftieth of the rate");
            assert_eq!(trend(-per_s, 0.0, -400.0, (-6.0, 0.0, 0.0)).is_some(), is_rising);
        }
        assert_eq!(trend(20.0, 0.9, 400.0, sure), None, "it has filled up, and stays so");
        assert_eq!(trend(20.0, 20.0, 400.0, (2.3, 2.3, 2.3)), None, "no trend");
        assert_eq!(trend(20.0, 20.0, 400.0, (-6.0, -6.0, -6.0)), None, "no trend upwards");
    }

    #[test]
    fn a_queue_must_change_by_more_where_the_answers_do_not() {
        for answers in [(0.0, 2.4, 0.0), (0.0, 0.0, 2.4)] {
            assert_eq!(trend(3.0, 2.1, 31.0, answers), Some(QueueTrend::Rising));
            assert_eq!(trend(3.0, 2.1, 29.0, answers), None);
            assert_eq!(trend(3.0, 1.9, 31.0, answers), None);
        }
        let queue_alone = (2.4, 0.0, 0.0);
        assert_eq!(trend(9.0, 6.8, 101.0, queue_alone), Some(QueueTrend::Rising));
        assert_eq!(trend(9.0, 6.8, 99.0, queue_alone), None);
        assert_eq!(trend(9.0, 6.5, 101.0, queue_alone), None);
    }

    #[test]
    fn percents_are_in_points_of_a_hundred() {
        assert_eq!(percent(0.1234), "12.3 %");
    }
}
