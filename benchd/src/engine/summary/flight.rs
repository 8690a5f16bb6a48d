//! Requests in flight over time: mean, peak and trend. A number that keeps growing says that the server falls behind.

use proto::record::Record;

use super::Selection;

/// Equal spans that the trend is taken over.
const SPANS: usize = 20;

/// Requests in flight.
pub(super) struct Flight {
    /// Mean over the selection.
    pub(super) mean: Option<f64>,
    /// Most, over the whole run.
    pub(super) peak: u64,
    /// Trend over the selection; absent when it has no length.
    pub(super) growth: Option<Growth>,
}

/// Trend of the requests in flight over the measured part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Least-squares slope of the means of equal spans.
    pub per_s: f64,
    /// That slope over the whole part, in requests.
    pub total: f64,
    /// Mean in flight.
    pub mean: f64,
    /// Statistic of the Mann–Kendall test on the spans' means, in standard deviations; above 0: rising.
    pub z: f64,
}

impl Flight {
    pub(super) fn of(all: &[Record], selection: &Selection<'_>) -> Self {
        let intervals: Vec<(i64, i64)> =
            all.iter().filter_map(|r| Some((r.sent_ns?, r.completed_ns.unwrap_or(i64::MAX)))).collect();
        let length_ns = selection.to_ns.saturating_sub(selection.from_ns);
        let is_long = length_ns >= i64::try_from(SPANS).unwrap_or(i64::MAX);
        let means = is_long.then(|| span_means(&intervals, selection.from_ns, length_ns));
        let mean = means.as_ref().map(|means| means.iter().sum::<f64>() / SPANS as f64);
        Flight {
            mean,
            peak: peak(&intervals),
            growth: means.zip(mean).map(|(means, mean)| {
                let per_span = slope(&means);
                Growth {
                    per_s: per_span / (selection.seconds() / SPANS as f64),
                    total: per_span * SPANS as f64,
                    mean,
                    z: mann_kendall_z(&means),
                }
            }),
        }
    }
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
