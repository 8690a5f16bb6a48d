//! Statistics of a report, and their flat names in files: `p50_ttft_ms`, `count_ttft`, `ci95_low_avg_latency_ms`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::interval::{Interval, Intervals};
use crate::metric::{Dist, Metric};

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
