//! The formula of every metric, from one record, and the one quantile. Pure functions, used by the daemon, by
//! live views and by everything that reads saved files, so that a figure means the same everywhere.
//!
//! All times are milliseconds; `None` means that the record does not have what the metric needs.

use serde::{Deserialize, Serialize};

use crate::record::Record;

/// A latency-like metric of the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Time to first token: first token − sent.
    Ttft,
    /// Time to first output token: first content event of the answer, reasoning left out − sent (AIPerf's TTFO).
    Ttfo,
    /// First chunk: content event number `first_chunk_threshold` − sent.
    Fc,
    /// Time per output token: (last token − first token) / (output tokens − 1).
    Tpot,
    /// Inter-chunk latency: gaps between content events, pooled.
    Icl,
    /// Inter-token latency: each gap divided by the tokens of its event, weighted by them, pooled.
    Itl,
    /// End to end: last token − sent.
    Latency,
    /// Client lateness: sent − due, without cap waiting.
    DispatchLag,
    /// Wait for a place under `max_concurrency`.
    CapWait,
    /// First token − due.
    TtftFromDue,
    /// Content event number `first_chunk_threshold` − due.
    FcFromDue,
    /// Last token − due.
    LatencyFromDue,
}

impl Metric {
    /// All of them, in the order of reports.
    pub const ALL: [Metric; 12] = [
        Metric::Ttft,
        Metric::Ttfo,
        Metric::Fc,
        Metric::Tpot,
        Metric::Icl,
        Metric::Itl,
        Metric::Latency,
        Metric::DispatchLag,
        Metric::CapWait,
        Metric::TtftFromDue,
        Metric::FcFromDue,
        Metric::LatencyFromDue,
    ];

    /// Its name in files, without the unit.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Ttft => "ttft",
            Metric::Ttfo => "ttfo",
            Metric::Fc => "fc",
            Metric::Tpot => "tpot",
            Metric::Icl => "icl",
            Metric::Itl => "itl",
            Metric::Latency => "latency",
            Metric::DispatchLag => "dispatch_lag",
            Metric::CapWait => "cap_wait",
            Metric::TtftFromDue => "ttft_from_due",
            Metric::FcFromDue => "fc_from_due",
            Metric::LatencyFromDue => "latency_from_due",
        }
    }

    /// Its value for one record; `None` also for the two that are pooled over gaps ([`itl_samples`], [`icl_ms`]).
    pub fn of(self, record: &Record) -> Option<f64> {
        match self {
            Metric::Ttft => ttft_ms(record),
            Metric::Ttfo => ttfo_ms(record),
            Metric::Fc => fc_ms(record),
            Metric::Tpot => tpot_ms(record),
            Metric::Icl | Metric::Itl => None,
            Metric::Latency => latency_ms(record),
            Metric::DispatchLag => dispatch_lag_ms(record),
            Metric::CapWait => record.sent_ns.map(|_| cap_wait_ms(record)),
            Metric::TtftFromDue => record.first_token_ns.map(|t| ms(t - record.due_ns)),
            Metric::FcFromDue => record.first_chunk_ns.map(|t| ms(t - record.due_ns)),
            Metric::LatencyFromDue => record.last_token_ns.map(|t| ms(t - record.due_ns)),
        }
    }
}

/// Nanoseconds as milliseconds.
pub fn ms(ns: i64) -> f64 {
    ns as f64 / 1e6
}

/// A gap of nanoseconds as milliseconds.
pub fn ms_of_gap(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Nanoseconds as seconds.
pub fn seconds(ns: i64) -> f64 {
    ns as f64 / 1e9
}

fn since_sent_ms(record: &Record, instant_ns: Option<i64>) -> Option<f64> {
    Some(ms(instant_ns? - record.sent_ns?))
}

/// First token − sent.
pub fn ttft_ms(record: &Record) -> Option<f64> {
    since_sent_ms(record, record.first_token_ns)
}

/// First content event of the answer − sent; equal to TTFT where nothing was reasoned.
pub fn ttfo_ms(record: &Record) -> Option<f64> {
    since_sent_ms(record, record.first_answer_ns)
}

/// Content event number `first_chunk_threshold` − sent; absent when there were fewer.
pub fn fc_ms(record: &Record) -> Option<f64> {
    since_sent_ms(record, record.first_chunk_ns)
}

/// Last token − sent; a late `[DONE]` or close does not count.
pub fn latency_ms(record: &Record) -> Option<f64> {
    since_sent_ms(record, record.last_token_ns)
}

/// (last token − first token) / (output tokens − 1); absent under 2 tokens, and where all of them came in one
/// event, whose spacing nobody saw.
pub fn tpot_ms(record: &Record) -> Option<f64> {
    let tokens = record.output_tokens?;
    if tokens < 2 || record.events < 2 {
        return None;
    }
    Some(ms(record.last_token_ns? - record.first_token_ns?) / f64::from(tokens - 1))
}

/// Lateness of the client itself: sent − due, without what was spent waiting for a place.
pub fn dispatch_lag_ms(record: &Record) -> Option<f64> {
    Some(ms(record.sent_ns? - record.due_ns) - ms_of_gap(record.cap_wait_ns))
}

/// Wait for a place under `max_concurrency`.
pub fn cap_wait_ms(record: &Record) -> f64 {
    ms_of_gap(record.cap_wait_ns)
}

/// A gap below this share of its reply's mean gap is no time that the model took.
const BURST_GAP_SHARE: f64 = 0.1;
/// Nor is a gap below this many ms: no model makes ten thousand tokens a second for one reply.
const BURST_GAP_MS: f64 = 0.1;

/// Gaps of a record that are no time of the model's: its event came together with the one before it.
pub fn burst_gaps(record: &Record) -> usize {
    let gaps = record.gaps.len();
    let mean_ms = icl_ms(record).sum::<f64>() / gaps.max(1) as f64;
    let bound_ms = BURST_GAP_MS.max(mean_ms * BURST_GAP_SHARE);
    icl_ms(record).filter(|gap| *gap < bound_ms).count()
}

/// Gaps between successive content events.
pub fn icl_ms(record: &Record) -> impl Iterator<Item = f64> + '_ {
    record.gaps.iter().map(ms_of_gap)
}

/// Each gap divided by the tokens that its event carried, with those tokens as its weight. Events said to carry
/// no token have no weight and are left out; their gap then belongs to the next event that carries some.
pub fn itl_samples(record: &Record) -> impl Iterator<Item = (f64, f64)> + '_ {
    // The first event ends no gap.
    let mut tokens = record.event_tokens.as_deref().map(|t| t.iter().skip(1));
    let mut waited_ms = 0.0;
    record.gaps.iter().filter_map(move |gap| {
        let tokens = match &mut tokens {
            Some(tokens) => f64::from(*tokens.next()?),
            None => 1.0,
        };
        waited_ms += ms_of_gap(gap);
        if tokens <= 0.0 {
            return None;
        }
        let sample = (waited_ms / tokens, tokens);
        waited_ms = 0.0;
        Some(sample)
    })
}

/// Mean of [`itl_samples`] by weight.
pub fn mean_itl_ms(record: &Record) -> Option<f64> {
    let (sum, weight) =
        itl_samples(record).fold((0.0, 0.0), |(sum, weight), (value, w)| (sum + value * w, weight + w));
    (weight > 0.0).then(|| sum / weight)
}

/// Quantile `q` of ascending values by linear interpolation between order statistics (numpy's default).
pub fn quantile(ascending: &[f64], q: f64) -> Option<f64> {
    let last = ascending.len().checked_sub(1)?;
    let at = q.clamp(0.0, 1.0) * last as f64;
    // `at` lies between 0 and the length.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let below = at.floor() as usize;
    let low = ascending[below];
    let high = ascending[(below + 1).min(last)];
    Some(low + (high - low) * (at - below as f64))
}

/// Count, mean, percentiles and maximum of a metric. Everything but the count is absent when the count is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dist {
    /// Values, by weight: for [`Metric::Itl`] tokens, rounded.
    pub count: u64,
    /// Arithmetic mean.
    pub avg: Option<f64>,
    /// Median.
    pub p50: Option<f64>,
    /// 90th percentile.
    pub p90: Option<f64>,
    /// 95th percentile.
    pub p95: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
    /// Largest value.
    pub max: Option<f64>,
}

impl Dist {
    /// Of plain values, each counting once.
    pub fn of(mut values: Vec<f64>) -> Dist {
        if values.is_empty() {
            return Dist::default();
        }
        values.sort_unstable_by(f64::total_cmp);
        Dist {
            count: values.len() as u64,
            avg: Some(values.iter().sum::<f64>() / values.len() as f64),
            p50: quantile(&values, 0.50),
            p90: quantile(&values, 0.90),
            p95: quantile(&values, 0.95),
            p99: quantile(&values, 0.99),
            max: values.last().copied(),
        }
    }

    /// Of (value, weight) pairs: as if each value stood as often as its weight says.
    pub fn of_weighted(mut samples: Vec<(f64, f64)>) -> Dist {
        samples.retain(|(_, w)| *w > 0.0);
        if samples.iter().all(|(_, w)| *w == 1.0) {
            return Dist::of(samples.into_iter().map(|(v, _)| v).collect());
        }
        samples.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let total: f64 = samples.iter().map(|(_, w)| w).sum();
        let mut upto = 0.0;
        let cumulative: Vec<f64> = samples
            .iter()
            .map(|(_, w)| {
                upto += w;
                upto
            })
            .collect();
        // Value at position `at` of the list in which every value is repeated by its weight.
        let value_at = |at: f64| {
            let index = cumulative.partition_point(|c| *c <= at).min(samples.len() - 1);
            samples[index].0
        };
        let quantile = |q: f64| {
            let at = q * (total - 1.0).max(0.0);
            let (low, high) = (value_at(at.floor()), value_at(at.floor() + 1.0));
            Some(low + (high - low) * (at - at.floor()))
        };
        // Tokens are few enough for an exact float, and never negative.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let count = total.round() as u64;
        Dist {
            count,
            avg: Some(samples.iter().map(|(v, w)| v * w).sum::<f64>() / total),
            p50: quantile(0.50),
            p90: quantile(0.90),
            p95: quantile(0.95),
            p99: quantile(0.99),
            max: samples.last().map(|(v, _)| *v),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gaps::Gaps;
    use crate::record::Outcome;
    use proptest::prelude::*;

    fn record(gaps_ms: &[u64], output_tokens: u32) -> Record {
        let mut gaps = Gaps::default();
        for g in gaps_ms {
            gaps.push(g * 1_000_000);
        }
        let first = 120_000_000;
        let last = first + i64::try_from(gaps_ms.iter().sum::<u64>()).unwrap() * 1_000_000;
        Record {
            session: Some(0),
            turn: Some(1),
            due_ns: 90_000_000,
            cap_wait_ns: 4_000_000,
            sent_ns: Some(100_000_000),
            first_token_ns: Some(first),
            first_answer_ns: Some(first),
            first_chunk_ns: None,
            last_token_ns: Some(last),
            completed_ns: Some(last),
            events: u32::try_from(gaps_ms.len()).unwrap() + 1,
            reads: u32::try_from(gaps_ms.len()).unwrap() + 1,
            is_whole: false,
            gaps,
            event_tokens: None,
            outcome: Outcome::Ok,
            error: None,
            finish_reason: None,
            planned_input_tokens: None,
            input_tokens: None,
            input_tokens_source: None,
            output_tokens: Some(output_tokens),
            output_tokens_source: None,
            reasoning_tokens: None,
            cached_tokens: None,
            expected_cached_tokens: None,
            reply_tokens: None,
            new_connection: false,
            resent: false,
        }
    }

    #[test]
    fn latencies_are_taken_from_sent_and_lag_leaves_cap_waiting_out() {
        let r = record(&[10, 30], 3);
        assert_eq!(ttft_ms(&r), Some(20.0));
        assert_eq!(latency_ms(&r), Some(60.0));
        assert_eq!(tpot_ms(&r), Some(20.0));
        assert_eq!(dispatch_lag_ms(&r), Some(6.0));
        assert_eq!(Metric::TtftFromDue.of(&r), Some(30.0));
        assert_eq!(fc_ms(&r), None);
    }

    #[test]
    fn tpot_is_absent_where_no_gap_was_seen() {
        assert_eq!(tpot_ms(&record(&[], 1)), None);
        assert_eq!(tpot_ms(&record(&[], 8)), None);
    }

    #[test]
    fn itl_divides_a_gap_by_the_tokens_of_its_event() {
        let mut r = record(&[10, 30, 8], 9);
        r.event_tokens = Some(Box::new([1.0, 2.0, 0.0, 4.0]));
        let samples: Vec<_> = itl_samples(&r).collect();
        assert_eq!(samples, [(5.0, 2.0), (9.5, 4.0)]);
        assert_eq!(mean_itl_ms(&r), Some(48.0 / 6.0));
    }

    #[test]
    fn events_that_come_together_leave_gaps_that_are_no_time_of_the_models() {
        assert_eq!(burst_gaps(&record(&[10, 12, 8, 30, 2], 6)), 0);
        assert_eq!(burst_gaps(&record(&[0, 0, 0, 40, 0, 0, 0], 8)), 6);
        assert_eq!(burst_gaps(&record(&[0, 0, 0], 4)), 3, "a whole answer at once");
        assert_eq!(burst_gaps(&record(&[], 1)), 0);
    }

    #[test]
    fn an_empty_distribution_has_a_count_and_nothing_else() {
        assert_eq!(Dist::of(vec![]), Dist::default());
        assert_eq!(Dist::of_weighted(vec![(3.0, 0.0)]), Dist::default());
    }

    // Values from numpy.percentile([15, 20, 35, 40, 50], q).
    #[test]
    fn quantiles_are_numpys() {
        let v = [15.0, 20.0, 35.0, 40.0, 50.0];
        for (q, want) in
            [(0.0, 15.0), (0.05, 16.0), (0.3, 23.0), (0.4, 29.0), (0.5, 35.0), (0.99, 49.6), (1.0, 50.0)]
        {
            assert!((quantile(&v, q).unwrap() - want).abs() < 1e-9, "q = {q}");
        }
    }

    proptest! {
        #[test]
        fn whole_weights_are_repetitions(samples in proptest::collection::vec((0.0..100.0f64, 1u8..5), 1..40)) {
            let weighted = Dist::of_weighted(samples.iter().map(|(v, w)| (*v, f64::from(*w))).collect());
            let plain = Dist::of(
                samples.iter().flat_map(|(v, w)| std::iter::repeat_n(*v, usize::from(*w))).collect(),
            );
            prop_assert_eq!(weighted.count, plain.count);
            for (a, b) in [(weighted.avg, plain.avg), (weighted.p50, plain.p50), (weighted.p99, plain.p99), (weighted.max, plain.max)] {
                prop_assert!((a.unwrap() - b.unwrap()).abs() < 1e-9);
            }
        }

        #[test]
        fn quantiles_are_monotone_and_within_the_data(values in proptest::collection::vec(-1e6..1e6f64, 1..50)) {
            let d = Dist::of(values.clone());
            let (min, max) = values.iter().fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(*v), b.max(*v)));
            let steps = [d.p50.unwrap(), d.p90.unwrap(), d.p95.unwrap(), d.p99.unwrap(), d.max.unwrap()];
            prop_assert!(steps.is_sorted());
            prop_assert!(steps[0] >= min && steps[4] == max);
        }
    }
}
