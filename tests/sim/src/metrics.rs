//! Counters and gauges of the running server, and their Prometheus text in vLLM's names.
//!
//! Every writer adds to atomics; nothing here ever waits.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Upper bounds of the time-to-first-token histogram, in s: vLLM's own.
const TTFT_BOUNDS_S: [f64; 21] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
];

#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub(crate) running: AtomicU64,
    pub(crate) waiting: AtomicU64,
    pub(crate) peak_running: AtomicU64,
    /// Blocks of the requests that run, by their full length
    pub(crate) blocks_in_use: AtomicU64,
    pub(crate) cache_queries: AtomicU64,
    pub(crate) cache_hits: AtomicU64,
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) generation_tokens: AtomicU64,
    pub(crate) finished_length: AtomicU64,
    pub(crate) finished_stop: AtomicU64,
    pub(crate) finished_abort: AtomicU64,
    /// Answers of any kind, refusals too
    pub(crate) requests: AtomicU64,
    /// Content events written
    pub(crate) events: AtomicU64,
    /// Times a client began not to read fast enough
    pub(crate) stalls: AtomicU64,
    /// Of content events against their own schedule, unless the client did not read
    pub(crate) lateness: Histogram,
    ttft: [AtomicU64; TTFT_BOUNDS_S.len() + 1],
    ttft_sum_ns: AtomicU64,
}

impl Metrics {
    /// Time from the request's last byte to the write of its first content.
    pub(crate) fn first_token(&self, ttft_ns: u64) {
        let ttft_s = seconds(ttft_ns);
        let bucket = TTFT_BOUNDS_S.iter().position(|bound| ttft_s <= *bound).unwrap_or(TTFT_BOUNDS_S.len());
        self.ttft[bucket].fetch_add(1, Relaxed);
        self.ttft_sum_ns.fetch_add(ttft_ns, Relaxed);
    }

    /// The Prometheus text. `cache_blocks` is the cache's capacity.
    pub(crate) fn render(&self, model: &str, cache_blocks: u32) -> String {
        let labels =
            format!("engine=\"0\",model_name=\"{}\"", model.replace('\\', "\\\\").replace('"', "\\\""));
        let mut out = String::new();
        let in_use = as_f64(self.blocks_in_use.load(Relaxed)) / f64::from(cache_blocks.max(1));
        for (name, kind, value) in [
            ("vllm:num_requests_running", "gauge", as_f64(self.running.load(Relaxed))),
            ("vllm:num_requests_waiting", "gauge", as_f64(self.waiting.load(Relaxed))),
            ("vllm:kv_cache_usage_perc", "gauge", in_use.min(1.0)),
            ("vllm:prefix_cache_queries_total", "counter", as_f64(self.cache_queries.load(Relaxed))),
            ("vllm:prefix_cache_hits_total", "counter", as_f64(self.cache_hits.load(Relaxed))),
            ("vllm:prompt_tokens_total", "counter", as_f64(self.prompt_tokens.load(Relaxed))),
            ("vllm:generation_tokens_total", "counter", as_f64(self.generation_tokens.load(Relaxed))),
        ] {
            let _ = writeln!(out, "# TYPE {name} {kind}\n{name}{{{labels}}} {value}");
        }
        let _ = writeln!(out, "# TYPE vllm:request_success_total counter");
        for (reason, count) in [
            ("length", &self.finished_length),
            ("stop", &self.finished_stop),
            ("abort", &self.finished_abort),
        ] {
            let count = count.load(Relaxed);
            let _ =
                writeln!(out, "vllm:request_success_total{{finished_reason=\"{reason}\",{labels}}} {count}");
        }
        let _ = writeln!(out, "# TYPE vllm:time_to_first_token_seconds histogram");
        let mut total = 0;
        let bounds = TTFT_BOUNDS_S.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&self.ttft) {
            total += count.load(Relaxed);
            let _ =
                writeln!(out, "vllm:time_to_first_token_seconds_bucket{{{labels},le=\"{bound}\"}} {total}");
        }
        let sum = seconds(self.ttft_sum_ns.load(Relaxed));
        let _ = writeln!(out, "vllm:time_to_first_token_seconds_sum{{{labels}}} {sum}");
        let _ = writeln!(out, "vllm:time_to_first_token_seconds_count{{{labels}}} {total}");
        let _ = writeln!(out, "# TYPE benchsim:lateness_us gauge");
        let late = self.lateness.summary_us();
        for (quantile, value) in [("p50", late.p50), ("p99", late.p99), ("max", late.max)] {
            let _ = writeln!(out, "benchsim:lateness_us{{quantile=\"{quantile}\"}} {}", value.unwrap_or(0.0));
        }
        for (name, count) in
            [("content_events", &self.events), ("requests", &self.requests), ("stalls", &self.stalls)]
        {
            let count = count.load(Relaxed);
            let _ = writeln!(out, "# TYPE benchsim:{name}_total counter\nbenchsim:{name}_total {count}");
        }
        out
    }
}

/// Lateness of content events, in µs; nothing when there were none.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(crate) struct Lateness {
    pub(crate) p50: Option<f64>,
    pub(crate) p99: Option<f64>,
    pub(crate) max: Option<f64>,
}

/// Steps in each doubling: a value is known to 1/32.
const STEPS: u64 = 32;
const BUCKETS: usize = 60 * 32;

/// Counts by size, in ns.
pub(crate) struct Histogram {
    buckets: Box<[AtomicU64]>,
    max: AtomicU64,
}

impl Histogram {
    pub(crate) fn add(&self, ns: u64) {
        self.buckets[bucket(ns)].fetch_add(1, Relaxed);
        self.max.fetch_max(ns, Relaxed);
    }

    pub(crate) fn summary_us(&self) -> Lateness {
        let counts: Vec<u64> = self.buckets.iter().map(|count| count.load(Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        let max_us = as_f64(self.max.load(Relaxed)) / 1e3;
        let quantile = |percent: u64| {
            let rank = (total * percent).div_ceil(100).max(1);
            let mut seen = 0;
            let at = counts.iter().position(|count| {
                seen += count;
                seen >= rank
            })?;
            Some((as_f64(upper_end(at)) / 1e3).min(max_us))
        };
        Lateness { p50: quantile(50), p99: quantile(99), max: (total > 0).then_some(max_us) }
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(), max: AtomicU64::new(0) }
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.summary_us().fmt(f)
    }
}

/// Below 2 · STEPS each value has its own bucket; above, each doubling has STEPS of them.
fn bucket(ns: u64) -> usize {
    let doublings = u64::from(ns.max(1).ilog2().saturating_sub(STEPS.ilog2()));
    usize::try_from(doublings * STEPS + (ns >> doublings)).map_or(BUCKETS - 1, |at| at.min(BUCKETS - 1))
}

/// The largest value of a bucket.
fn upper_end(bucket: usize) -> u64 {
    let at = bucket as u64;
    let doublings = (at / STEPS).saturating_sub(1);
    ((at - doublings * STEPS + 1) << doublings) - 1
}

#[allow(clippy::cast_precision_loss)] // counts stay far below 2^53
fn as_f64(count: u64) -> f64 {
    count as f64
}

fn seconds(ns: u64) -> f64 {
    as_f64(ns) / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_one_another_without_gap() {
        let mut last = bucket(0);
        for ns in 1..100_000 {
            let at = bucket(ns);
            assert!(at == last || at == last + 1, "{ns}");
            assert!(upper_end(at) >= ns && (at == 0 || upper_end(at - 1) < ns), "{ns}");
            last = at;
        }
        assert!(bucket(u64::MAX) < BUCKETS);
    }

    #[test]
    fn quantiles_are_known_to_a_thirty_second() {
        let histogram = Histogram::default();
        assert!(histogram.summary_us().p50.is_none());
        (1..=1000).for_each(|us| histogram.add(us * 1000));
        let late = histogram.summary_us();
        assert!((late.p50.unwrap() / 500.0 - 1.0).abs() < 0.04);
        assert!((late.p99.unwrap() / 990.0 - 1.0).abs() < 0.04);
        assert_eq!(late.max, Some(1000.0));
    }

    #[test]
    fn the_text_is_cumulative_and_labelled() {
        let metrics = Metrics::default();
        metrics.first_token(30_000_000);
        metrics.first_token(3_000_000_000_000);
        let text = metrics.render("m", 10);
        assert!(text.contains(
            "vllm:time_to_first_token_seconds_bucket{engine=\"0\",model_name=\"m\",le=\"0.02\"} 0"
        ));
        assert!(text.contains("le=\"0.04\"} 1"));
        assert!(text.contains("le=\"+Inf\"} 2"));
        assert!(text.contains("vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"m\"} 0"));
    }
}
