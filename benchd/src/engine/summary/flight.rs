//! Requests in flight over time, and whether they and those that still wait for a place keep growing or shrinking: then
//! the server falls behind, or recovers, and its latencies depend on when they are taken.

use proto::metric::{self, Metric};
use proto::record::Record;

use super::{Selection, mean};

/// Equal spans that trends are taken over.
const SPANS: usize = 20;

/// Requests in flight.
pub(super) struct Flight {
    /// Mean over the selection.
    pub(super) mean: Option<f64>,
    /// Most, over the whole run.
    pub(super) peak: u64,
    /// Least-squares slope over the selection; absent when it has no length.
    pub(super) growth_per_s: Option<f64>,
    /// Trend of the queue over the selection; absent when it has no length.
    pub(super) queue: Option<Growth>,
}

/// Trend over the measured part of the queue: requests that were due and are not yet answered, those that wait for a
/// place under `max_concurrency` included, so that a cap does not hide a server that falls behind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Least-squares slope of the means of equal spans, in requests a second.
    pub per_s: f64,
    /// The same over the second half alone. A queue that only fills up to the server's latency has stopped growing there.
    pub late_per_s: f64,
    /// The slope over the whole part, in requests.
    pub total: f64,
    /// The late slope over the second half, in requests.
    pub late_total: f64,
    /// Mean of the queue.
    pub mean: f64,
    /// Statistic of the Mann–Kendall test on the spans' means, in standard deviations; above 0: rising.
    pub queue_z: f64,
    /// TTFT from due over the whole part.
    pub ttft: Drift,
    /// Latency from due over the whole part.
    pub latency: Drift,
}

/// Trend of what the requests due in each span took on average.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Drift {
    /// Least-squares slope over the whole part, in ms.
    pub total_ms: f64,
    /// Statistic of the Mann–Kendall test; above 0: rising.
    pub z: f64,
}

impl Flight {
    pub(super) fn of(all: &[Record], selection: &Selection<'_>) -> Self {
        let until = |r: &Record| r.completed_ns.unwrap_or(i64::MAX);
        let in_flight: Vec<(i64, i64)> = all.iter().filter_map(|r| Some((r.sent_ns?, until(r)))).collect();
        let queue: Vec<(i64, i64)> =
            all.iter().filter(|r| r.sent_ns.is_some()).map(|r| (r.due_ns, until(r))).collect();
        let length_ns = selection.to_ns.saturating_sub(selection.from_ns);
        let is_long = length_ns >= i64::try_from(SPANS).unwrap_or(i64::MAX);
        let span_s = selection.seconds() / SPANS as f64;
        let means = |intervals| is_long.then(|| span_means(intervals, selection.from_ns, length_ns));
        let flights = means(&in_flight);
        Flight {
            mean: flights.as_ref().and_then(|means| mean(means.iter().copied())),
            peak: peak(&in_flight),
            growth_per_s: flights.map(|means| slope(&means) / span_s),
            queue: means(&queue).map(|means| {
                let late = &means[SPANS / 2..];
                Growth {
                    per_s: slope(&means) / span_s,
                    late_per_s: slope(late) / span_s,
                    total: slope(&means) * SPANS as f64,
                    late_total: slope(late) * late.len() as f64,
                    mean: means.iter().sum::<f64>() / SPANS as f64,
                    queue_z: mann_kendall_z(&means),
                    ttft: drift(selection, Metric::TtftFromDue),
                    latency: drift(selection, Metric::LatencyFromDue),
                }
            }),
        }
    }
}

/// Trend of a metric's mean over the equal spans that requests are due in, without those that have none.
fn drift(selection: &Selection<'_>, metric: Metric) -> Drift {
    let span_s = selection.seconds() / SPANS as f64;
    let mut sums = [(0.0, 0.0); SPANS];
    for record in selection.successes() {
        let Some(value_ms) = metric.of(record) else { continue };
        // Requests of a selection are due in it.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let span = (metric::seconds(record.due_ns - selection.from_ns) / span_s) as usize;
        let (sum, count) = &mut sums[span.min(SPANS - 1)];
        *sum += value_ms;
        *count += 1.0;
    }
    let means: Vec<f64> =
        sums.iter().filter(|(_, count)| *count > 0.0).map(|(sum, count)| sum / count).collect();
    Drift { total_ms: slope(&means) * means.len() as f64, z: mann_kendall_z(&means) }
}

/// Mean in flight in each of equal spans.
fn span_means(intervals: &[(i64, i64)], from_ns: i64, length_ns: i64) -> Vec<f64> {
    let span_ns = length_ns as f64 / SPANS as f64;
    let mut busy_ns = vec![0.0; SPANS];
    for (sent_ns, completed_ns) in intervals {
        let start = (sent_ns - from_ns).max(0) as f64;
        let end = completed_ns.saturating_sub(from_ns).min(length_ns) as f64;
        if end <= start {
            continue;
        }
        // Both lie within the length.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let (first, last) = ((start / span_ns) as usize, ((end / span_ns) as usize).min(SPANS - 1));
        for (index, busy) in busy_ns.iter_mut().enumerate().take(last + 1).skip(first) {
            let (low, high) = (index as f64 * span_ns, (index + 1) as f64 * span_ns);
            *busy += (end.min(high) - start.max(low)).max(0.0);
        }
    }
    busy_ns.into_iter().map(|busy| busy / span_ns).collect()
}

fn peak(intervals: &[(i64, i64)]) -> u64 {
    // At the same instant an end comes before a start.
    let mut steps: Vec<(i64, i64)> =
        intervals.iter().flat_map(|(from, to)| [(*from, 1), (*to, -1)]).collect();
    steps.sort_unstable();
    let (mut now, mut peak) = (0i64, 0i64);
    for (_, step) in steps {
        now += step;
        peak = peak.max(now);
    }
    peak.unsigned_abs()
}

/// Least-squares slope of values at 0, 1, 2, …
fn slope(values: &[f64]) -> f64 {
    let n = values.len() as f64;
    let middle = (n - 1.0) / 2.0;
    let mean = values.iter().sum::<f64>() / n;
    let (covariance, variance) = values.iter().enumerate().fold((0.0, 0.0), |(c, v), (i, value)| {
        let x = i as f64 - middle;
        (c + x * (value - mean), v + x * x)
    });
    if variance > 0.0 { covariance / variance } else { 0.0 }
}

/// The Mann–Kendall test for a trend: pairs that rise less pairs that fall, over its standard deviation when there is
/// no trend, which is √(n(n−1)(2n+5)/18).
fn mann_kendall_z(values: &[f64]) -> f64 {
    let mut s = 0.0;
    for (i, early) in values.iter().enumerate() {
        for late in &values[i + 1..] {
            s += match late.total_cmp(early) {
                std::cmp::Ordering::Greater => 1.0,
                std::cmp::Ordering::Less => -1.0,
                std::cmp::Ordering::Equal => 0.0,
            };
        }
    }
    let n = values.len() as f64;
    let deviation = (n * (n - 1.0) * (2.0 * n + 5.0) / 18.0).sqrt();
    if deviation > 0.0 { s / deviation } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_counts_an_end_before_a_start_at_the_same_instant() {
        assert_eq!(peak(&[(0, 10), (10, 20)]), 1);
        assert_eq!(peak(&[(0, 10), (5, 20), (6, 8)]), 3);
        assert_eq!(peak(&[]), 0);
    }

    #[test]
    fn a_request_counts_in_each_span_for_the_time_that_it_was_in_flight() {
        let means = span_means(&[(-50, 15), (10, 30)], 0, 200);
        assert!((means[0] - 1.0).abs() < 1e-9);
        assert!((means[1] - 1.5).abs() < 1e-9);
        assert!((means[2] - 1.0).abs() < 1e-9);
        assert_eq!(means[3..].iter().sum::<f64>(), 0.0);
    }

    // s = 10 of 10 pairs; scipy.stats.kendalltau's normal approximation has the same variance, 50/3.
    #[test]
    fn a_rise_has_a_slope_and_a_trend() {
        let rise = [1.0, 3.0, 5.0, 7.0, 9.0];
        assert!((slope(&rise) - 2.0).abs() < 1e-12);
        assert!((mann_kendall_z(&rise) - 10.0 / (50.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!(mann_kendall_z(&[4.0; 5]), 0.0);
    }
}
