//! Hand-made values for the tests: a run that went well, one that did not, one that measured nothing.

use std::collections::BTreeMap;

use proto::interval::{Interval, Intervals};
use proto::metric::{Dist, Metric};
use proto::plan::{Arrival, Load};
use proto::report::{
    Benchmark, Failures, Reason, ReasonKind, Report, ServerReport, SmokeReport, Stats, TURN_METRICS, Trust,
    TurnShare, TurnStats, Verdict, WaitDist,
};
use serde_json::json;

/// Values around `middle`, spread over a tenth of it.
fn dist(middle: f64, count: u32) -> Dist {
    let step = middle * 0.1 / f64::from(count.max(1));
    Dist::of((0..count).map(|i| middle + step * f64::from(i)).collect())
}

fn turn(turn: u32, count: u32, ttft: f64) -> TurnStats {
    let middles = [ttft, ttft + 75.0, 5.0, 5.0, ttft + 155.0];
    TurnStats {
        turn,
        count: u64::from(count),
        avg_isl: Some(312.0 + 125.0 * f64::from(turn - 1)),
        dists: TURN_METRICS.into_iter().zip(middles.map(|middle| dist(middle, count))).collect(),
    }
}

/// A closed loop of 4 turns that went well.
pub(crate) fn report() -> Report {
    let mut stats = Stats {
        throughput_tok_s: Some(1312.25),
        input_throughput_tok_s: Some(20_512.0),
        measured_request_rate: Some(41.01),
        avg_input_tokens: Some(499.5),
        avg_output_tokens: Some(32.0),
        error_rate: Some(0.0),
        ..Stats::default()
    };
    for (metric, middle, count) in [
        (Metric::Ttft, 22.0, 376),
        (Metric::Fc, 97.0, 376),
        (Metric::Tpot, 5.0, 376),
        (Metric::Icl, 5.0, 11_656),
        (Metric::Itl, 5.0, 11_656),
        (Metric::Latency, 177.0, 376),
        (Metric::DispatchLag, 0.061, 376),
        (Metric::TtftFromDue, 22.1, 376),
        (Metric::FcFromDue, 97.1, 376),
        (Metric::LatencyFromDue, 177.1, 376),
    ] {
        stats.dists.insert(metric, dist(middle, count));
    }
    stats.dists.insert(Metric::CapWait, Dist::of(vec![0.0; 376]));
    for (metric, middle) in [(Metric::Ttft, 23.1), (Metric::Tpot, 5.25), (Metric::Latency, 185.9)] {
        let around =
            |ratio: f64| Some(Interval { low: middle * ratio * 0.995, high: middle * ratio * 1.005 });
        // Where one is short of requests for the highest percentile.
        let p99 = around(1.047).filter(|_| metric == Metric::Tpot);
        let (p90, p95) = (around(1.038), around(1.043));
        stats.intervals.insert(metric, Intervals { avg: around(1.0), p50: around(1.0), p90, p95, p99 });
    }
    serde_json::from_value(json!({
        "schema_version": 1,
        "verdict": { "trust": "valid", "reasons": [] },
        "config": {
            "url": "http://127.0.0.1:40001", "model": "sim", "tokenizer": "builtin", "tokenizer_sha256": "ab",
            "mode": "closed", "concurrency": 8, "num_sessions": 96, "seed": 12_345, "request_timeout_s": 300.0,
        },
        "spec": {
            "isl": 500, "osl": 32, "hit_rate": 0.6, "hit_rate_given": true, "num_turns": 4,
            "shared_system_prompt_ratio": 0.0, "shared_system_prompt_ratio_given": false, "think_time_s": 0.0,
            "block_size": 16, "user_tokens_per_turn": 125, "system_prompt_tokens": 140,
            "shared_system_prompt": 0, "unique_system_prompt": 140, "effective_isl": 500.5,
            "effective_hit_rate": 0.6004, "effective_hit_rate_by_blocks": 0.5874,
            "feasible_hit_rate": { "min": 0.123_41, "max": 0.998 },
            "feasible_shared_system_prompt_ratio": { "min": 0.0, "max": 1.0 },
            "per_turn": [
                { "turn": 1, "total": 265, "cached": 0, "new": 265, "hit_rate": 0.0, "cached_by_blocks": 0 },
                { "turn": 2, "total": 422, "cached": 297, "new": 125, "hit_rate": 0.7038, "cached_by_blocks": 288 },
                { "turn": 3, "total": 579, "cached": 454, "new": 125, "hit_rate": 0.7841, "cached_by_blocks": 448 },
                { "turn": 4, "total": 736, "cached": 611, "new": 125, "hit_rate": 0.8302, "cached_by_blocks": 608 },
            ],
            "notices": [],
        },
        "first_chunk_threshold": 16,
        "benchmark": {
            "total_requests": 404, "warmup_requests": 20, "measured_requests": 376, "drain_requests": 8,
            "failed_requests": 0, "refused_requests": 0, "aborted_requests": 0, "duration_s": 9.91,
            "measured_s": 9.17, "is_partial": false, "steady_state_reached": true, "statistics_of_all": false,
        },
        "stats": stats,
        "per_turn": (1..=4).map(|n| turn(n, 94, 22.0)).collect::<Vec<_>>(),
        "load": {
            "planned_slots": null, "sent": 404, "refused": 0, "unsent": 0, "asked_rate_per_s": null,
            "planned_rate_per_s": null, "sent_rate_per_s": 41.02, "planned_isl": 500.5, "achieved_isl": 500.5,
            "planned_osl": 32.0, "achieved_osl": 32.0, "exact_prompts": 376, "residuals": {},
            "uncounted_prompts": 0,
            "turn_mix": (1..=4).map(|turn| TurnShare { turn, sent: 94, planned: 0.25, achieved: Some(0.25) })
                .collect::<Vec<_>>(),
            "sessions_started": 104, "sessions_completed": 98, "sessions_failed": 0, "sessions_beyond_plan": 0,
            "sessions_cut_short": 0, "ready_wait_ms": { "count": 0, "avg": null, "p99": null },
            "mean_in_flight": 7.98, "peak_in_flight": 8, "in_flight_growth_per_s": 0.001,
            "prompt_supply_dry": 0, "new_connections": 0, "resent": 0,
        },
        "hit_rate": {
            "planned": 0.6004, "planned_by_blocks": 0.5874, "expected": 0.6004,
            "expected_by_blocks": 0.5874, "reported": 0.5871,
            "reported_missing": null, "reported_requests": 376, "first_turn_unexpected": 0.0,
            "counted": 0.5868, "counted_missing": null, "counted_from_ms": 712.4, "counted_to_ms": 10_001.2,
            "counted_whole_run": 0.5712, "reported_whole_run": 0.5712,
        },
        "server": {
            "metrics_url": "http://127.0.0.1:40001/metrics", "kind": "vllm", "missing": null, "scrapes": 12,
            "failed_scrapes": 0, "last_failure": null,
            "window": {
                "from_ms": 712.4, "to_ms": 10_001.2, "prompt_tokens": 190_000, "generation_tokens": 12_100,
                "cache_queries": 190_000, "cache_hits": 111_492, "ttft_count": 379, "avg_ttft_ms": 21.874,
                "samples": 11, "running": { "mean": 7.91, "max": 8.0 }, "waiting": { "mean": 0.182, "max": 2.0 },
                "kv_cache_usage": { "mean": 0.0412, "max": 0.0533 },
                "client_ttft_count": 379, "client_avg_ttft_ms": 22.341,
            },
            "whole_run": {
                "from_ms": -12.5, "to_ms": 10_001.2, "prompt_tokens": 202_000, "generation_tokens": 12_900,
                "cache_queries": 202_000, "cache_hits": 115_382, "ttft_count": 404, "avg_ttft_ms": 21.9,
            },
            "own_prompt_tokens": 202_000, "own_cached_tokens": 115_382,
        },
        "stream": { "tokens_per_event": 1.0, "events_per_read": 1.0, "burst_share": 0.0, "is_bursty": false, "whole_answers": 0 },
        "client": {
            "stalls": 0, "longest_stall_ms": null, "requests_in_stalls": 0, "process_cores": 0.213,
            "busiest_thread": "data", "busiest_thread_cores": 0.127, "stolen_share": 0.0, "throttled_share": null,
        },
        "failures": {
            "total": 0,
            // Kept without a count, for the tests of a run in which all failed.
            "kinds": [{ "outcome": "http_status", "http_status": 500, "count": 0, "rate": 0.0,
                "by_phase": { "warm_up": 1, "measured": 3 }, "by_turn": { "1": 3, "2": 1 },
                "samples": ["the engine died"] }],
        },
        "preparation": {
            "dropped_parameters": [],
            "template": { "first_turn_tokens": 10, "later_turn_tokens": 8 },
            "calibration": (1..=3).map(|turns| json!({
                "purpose": "calibration", "turns": turns, "with_system": true, "content_tokens": 20,
                "prompt_tokens": 30, "cached_tokens": 0, "status": 200,
            })).collect::<Vec<_>>(),
            "notices": [],
        },
        "histograms": {},
        "environment": {
            "benchd_version": "0.1.0", "protocol_version": 1, "host": "bench", "os": "Linux 6", "cpus": 2,
            "command_line": ["benchctl", "run", "--sim"], "seed": 12_345, "plan_hash": "cd",
            "started_at_epoch_s": 1_764_566_052.0, "origin_monotonic_ns": 1,
        },
    }))
    .unwrap()
}

/// An open loop in which the server was too slow and failed at times, stopped before its end.
pub(crate) fn troubled_report() -> Report {
    let mut r = report();
    let reason = |kind, code: &str, text: &str| Reason { kind, code: code.into(), text: text.into() };
    r.verdict = Verdict {
        trust: Trust::Suspect,
        reasons: vec![
            reason(ReasonKind::Client, "dispatch_lag", "dispatch lag p99 was 3.2 ms, above 1 ms"),
            reason(ReasonKind::Load, "refused", "12 slots were refused"),
            reason(ReasonKind::Server, "error_rate", "the error rate was 3.1 %, above 1 %"),
        ],
    };
    r.config.load = Load::Open {
        request_rate_per_s: 50.0,
        duration_s: 20.0,
        warm_up_s: 5.0,
        arrival: Arrival::Gamma { burstiness: 0.5 },
        max_concurrency: Some(64),
        max_in_flight: 100,
        drain_timeout_s: 60.0,
    };
    r.spec.notices = vec!["the shared ratio was raised from 0 to 0.11".into()];
    r.benchmark.is_partial = true;
    r.benchmark.failed_requests = 12;
    r.benchmark.refused_requests = 12;
    r.benchmark.aborted_requests = 3;
    r.stats.error_rate = Some(0.0309);
    r.stats.dists.insert(Metric::Icl, dist(20.0, 2914));
    r.stats.dists.insert(Metric::CapWait, dist(40.0, 376));
    r.stats.dists.insert(Metric::Fc, Dist::default());
    r.stats.dists.insert(Metric::Latency, dist(12_345.6, 1500));
    r.stats.intervals.values_mut().for_each(|i| *i = Intervals::default());
    r.load.planned_slots = Some(1003);
    r.load.asked_rate_per_s = Some(50.0);
    r.load.planned_rate_per_s = Some(50.2);
    r.load.residuals = BTreeMap::from([(-2, 1), (3, 4)]);
    r.load.exact_prompts = 371;
    r.load.uncounted_prompts = 12;
    r.load.refused = 12;
    r.load.unsent = 7;
    r.load.sessions_beyond_plan = 21;
    r.load.sessions_cut_short = 4;
    r.load.resent = 1;
    r.load.new_connections = 64;
    r.load.ready_wait_ms = WaitDist { count: 300, avg: Some(12.0), p99: Some(80.5) };
    r.load.in_flight_growth_per_s = Some(2.5);
    r.hit_rate.reported = None;
    r.hit_rate.reported_missing = Some("usage has no cached tokens".into());
    r.hit_rate.reported_requests = 0;
    r.hit_rate.first_turn_unexpected = Some(0.021);
    r.hit_rate.counted = None;
    r.hit_rate.counted_missing =
        Some("the server's counters went back: it was restarted during the run".into());
    if let Some(server) = &mut r.server {
        server.failed_scrapes = 2;
        server.last_failure = Some("http://127.0.0.1:40001/metrics answers with status 503".into());
    }
    r.failures.total = 12;
    r.failures.kinds[0].count = 12;
    r.failures.kinds[0].rate = 0.0309;
    r.preparation.template = None;
    r.preparation.dropped_parameters = vec!["min_tokens: dropped".into()];
    r.preparation.notices = vec!["the server lists no models".into()];
    r
}

/// A run that was stopped before anything was answered.
pub(crate) fn empty_report() -> Report {
    let mut r = report();
    r.benchmark = Benchmark {
        total_requests: 8,
        warmup_requests: 8,
        measured_requests: 0,
        drain_requests: 0,
        failed_requests: 0,
        refused_requests: 0,
        aborted_requests: 8,
        duration_s: 0.2,
        measured_s: 0.0,
        is_partial: true,
        error_limit_reached: false,
        steady_state_reached: Some(false),
        statistics_of_all: true,
    };
    r.stats = Stats::default();
    r.per_turn = vec![];
    r.failures = Failures::default();
    r.load.sent_rate_per_s = None;
    r.load.achieved_isl = None;
    r.load.achieved_osl = None;
    r.load.planned_isl = None;
    r.load.exact_prompts = 0;
    r.load.turn_mix = vec![TurnShare { turn: 1, sent: 0, planned: 0.25, achieved: None }];
    r.load.mean_in_flight = None;
    r.load.in_flight_growth_per_s = None;
    r.hit_rate.expected = None;
    r.hit_rate.expected_by_blocks = None;
    r.hit_rate.reported = None;
    r.hit_rate.reported_missing = Some("no request succeeded".into());
    let why = "http://127.0.0.1:40001/metrics answers with status 404";
    r.hit_rate.counted = None;
    r.hit_rate.counted_missing = Some(why.into());
    r.server = Some(ServerReport { missing: Some(why.into()), ..ServerReport::default() });
    r
}

/// A smoke request that was answered.
pub(crate) fn smoke() -> SmokeReport {
    SmokeReport {
        url: "http://localhost:8000".into(),
        model: "my-model".into(),
        models: Some(vec!["my-model".into(), "other".into()]),
        ttft_ms: Some(21.456),
        latency_ms: Some(61.2),
        input_tokens: Some(18),
        output_tokens: None,
        reply: "Hello! How".into(),
        has_usage: true,
        has_cached_tokens: false,
        has_metrics: true,
        has_tokenize: true,
        dropped_parameters: vec!["ignore_eos: dropped".into()],
    }
}
