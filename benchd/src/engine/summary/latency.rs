//! Latencies and throughput: the pools that distributions are taken from, and their histograms.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hdrhistogram::Histogram;
use hdrhistogram::serialization::{Serializer, V2DeflateSerializer};
use proto::interval::Intervals;
use proto::metric::{self, Dist, Metric};
use proto::record::Record;
use proto::report::{INTERVAL_METRICS, Stats, TURN_METRICS, TurnStats};
use proto::spec::Spec;

use super::{Selection, mean, share};

/// Gaps in a pool up to which quantiles are exact; beyond, they come from the histogram and are marked.
const EXACT_POOL: u64 = 50_000_000;
/// Significant decimal digits of histograms.
const HISTOGRAM_DIGITS: u8 = 3;

/// Statistics of a selection, and the histogram of each metric that has values.
pub(super) fn stats(all: &[Record], selection: &Selection<'_>) -> (Stats, BTreeMap<String, String>) {
    stats_with_limit(all, selection, EXACT_POOL)
}

pub(super) fn stats_with_limit(
    all: &[Record],
    selection: &Selection<'_>,
    exact_pool: u64,
) -> (Stats, BTreeMap<String, String>) {
    let sent: Vec<&Record> = selection.sent().collect();
    let successes: Vec<&Record> = selection.successes().collect();
    let gaps: u64 = successes.iter().map(|r| r.gaps.len() as u64).sum();
    let mut stats = Stats::default();
    let mut histograms = BTreeMap::new();
    for metric in Metric::ALL {
        let mut histogram = Microseconds::new();
        let is_exact = !is_pooled(metric) || gaps <= exact_pool;
        let dist = if is_exact {
            // Latencies are over successes; what the client itself did, over all that it sent.
            let is_clients_own = matches!(metric, Metric::DispatchLag | Metric::CapWait);
            let records = if is_clients_own { &sent } else { &successes };
            let samples = samples(metric, records);
            for (value, weight) in &samples {
                histogram.record(*value, *weight);
            }
            Dist::of_weighted(samples)
        } else {
            for record in &successes {
                visit(metric, record, |value, weight| histogram.record(value, weight));
            }
            stats.from_histogram.push(metric);
            histogram.dist()
        };
        stats.dists.insert(metric, dist);
        if let Some(text) = histogram.text() {
            histograms.insert(format!("{}_us", metric.name()), text);
        }
    }
    let mut in_order = successes.clone();
    in_order.sort_by_key(|r| r.due_ns);
    for metric in INTERVAL_METRICS {
        let values: Vec<f64> = in_order.iter().filter_map(|r| metric.of(r)).collect();
        stats.intervals.insert(metric, Intervals::of(&values));
    }
    let completions = selection.records.iter().filter(|r| r.outcome.is_completion()).count();
    let failures = selection.records.iter().filter(|r| r.outcome.is_failure()).count();
    let completed_inside =
        || all.iter().filter(|r| r.outcome.is_ok() && r.completed_ns.is_some_and(|at| selection.holds(at)));
    let tokens_inside: f64 = all.iter().map(|r| tokens_inside(r, selection)).sum();
    let input_inside: f64 = completed_inside().filter_map(|r| r.input_tokens).map(f64::from).sum();
    stats.throughput_tok_s = selection.per_second(tokens_inside);
    stats.input_throughput_tok_s = selection.per_second(input_inside);
    stats.measured_request_rate = selection.per_second(completed_inside().count() as f64);
    stats.avg_input_tokens = mean(successes.iter().filter_map(|r| r.input_tokens).map(f64::from));
    stats.avg_output_tokens = mean(successes.iter().filter_map(|r| r.output_tokens).map(f64::from));
    stats.avg_reasoning_tokens = mean(successes.iter().filter_map(|r| r.reasoning_tokens).map(f64::from));
    stats.error_rate = share(failures as f64, completions as f64);
    (stats, histograms)
}

/// Statistics of each turn, by the successes of a selection.
pub(super) fn per_turn(spec: &Spec, selection: &Selection<'_>) -> Vec<TurnStats> {
    let mut by_turn: BTreeMap<u32, Vec<&Record>> =
        (1..=spec.num_turns).map(|turn| (turn, Vec::new())).collect();
    for record in selection.successes() {
        if let Some(turn) = record.turn {
            by_turn.entry(turn).or_default().push(record);
        }
    }
    by_turn
        .into_iter()
        .map(|(turn, records)| TurnStats {
            turn,
            count: records.len() as u64,
            avg_isl: mean(records.iter().filter_map(|r| r.input_tokens).map(f64::from)),
            dists: TURN_METRICS
                .into_iter()
                .map(|metric| (metric, Dist::of_weighted(samples(metric, &records))))
                .collect(),
        })
        .collect()
}

/// Metrics that have a value for each gap, not for each request.
fn is_pooled(metric: Metric) -> bool {
    matches!(metric, Metric::Icl | Metric::Itl)
}

fn samples(metric: Metric, records: &[&Record]) -> Vec<(f64, f64)> {
    let mut samples = Vec::new();
    for record in records {
        visit(metric, record, |value, weight| samples.push((value, weight)));
    }
    samples
}

/// A record's values for a metric, with their weights.
fn visit(metric: Metric, record: &Record, mut take: impl FnMut(f64, f64)) {
    match metric {
        Metric::Icl => metric::icl_ms(record).for_each(|value| take(value, 1.0)),
        Metric::Itl => metric::itl_samples(record).for_each(|(value, weight)| take(value, weight)),
        _ => {
            if let Some(value) = metric.of(record) {
                take(value, 1.0);
            }
        }
    }
}

/// Output tokens of a request that arrived inside, event by event.
fn tokens_inside(record: &Record, selection: &Selection<'_>) -> f64 {
    let (Some(first_ns), Some(last_ns)) = (record.first_token_ns, record.last_token_ns) else { return 0.0 };
    if last_ns < selection.from_ns || first_ns >= selection.to_ns {
        return 0.0;
    }
    let mut at_ns = first_ns;
    let mut tokens = record.event_tokens.as_deref().map(|t| t.iter());
    let mut inside = 0.0;
    // The first event ends no gap.
    for gap in std::iter::once(0).chain(record.gaps.iter()) {
        at_ns = at_ns.saturating_add(i64::try_from(gap).unwrap_or(i64::MAX));
        let carried = match &mut tokens {
            Some(tokens) => tokens.next().copied().map_or(0.0, f64::from),
            None => 1.0,
        };
        if selection.holds(at_ns) {
            inside += carried;
        }
    }
    inside
}

/// A histogram of a metric, in microseconds.
struct Microseconds {
    histogram: Histogram<u64>,
    /// Weight that is not counted yet, since histograms count in whole numbers.
    carried: f64,
}

impl Microseconds {
    fn new() -> Self {
        let histogram = Histogram::new(HISTOGRAM_DIGITS).expect("three digits are within 0 to 5");
        Microseconds { histogram, carried: 0.0 }
    }

    fn record(&mut self, value_ms: f64, weight: f64) {
        self.carried += weight;
        let count = self.carried.round().max(0.0);
        self.carried -= count;
        // Latencies of at most some hours and weights of some tokens; below 0 there is nothing.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let (value, count) = ((value_ms * 1000.0).round().max(0.0) as u64, count as u64);
        self.histogram.record_n(value, count).expect("the histogram grows with its values");
    }

    fn dist(&self) -> Dist {
        if self.histogram.is_empty() {
            return Dist::default();
        }
        let at = |q: f64| Some(self.histogram.value_at_quantile(q) as f64 / 1000.0);
        Dist {
            count: self.histogram.len(),
            avg: Some(self.histogram.mean() / 1000.0),
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            max: Some(self.histogram.max() as f64 / 1000.0),
        }
    }

    /// HdrHistogram's V2 format, compressed, in base64; absent without values.
    fn text(&self) -> Option<String> {
        if self.histogram.is_empty() {
            return None;
        }
        let mut bytes = Vec::new();
        V2DeflateSerializer::new().serialize(&self.histogram, &mut bytes).expect("memory takes every write");
        Some(STANDARD.encode(bytes))
    }
}
