//! Every statistic of a saved file, computed anew from its `raw_metrics` by code of this test's own; and beside it what
//! the simulator measured of the same requests.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;

use serde_json::Value;
use support::{Finished, Saved, key, near, run};

/// numpy.percentile(values, 100 · q), method "linear".
fn percentile(sorted: &[f64], q: f64) -> f64 {
    let virtual_index = (sorted.len() - 1) as f64 * q;
    let (mut previous, mut next) = (sorted[0], sorted[sorted.len() - 1]);
    for (i, value) in sorted.iter().enumerate() {
        if i as f64 <= virtual_index {
            previous = *value;
        }
        if i as f64 >= virtual_index {
            next = *value;
            break;
        }
    }
    previous + (next - previous) * virtual_index.fract()
}

/// The figures of a metric, or nulls where it has no value.
#[track_caller]
fn has_figures_of(object: &Value, metric: &str, mut values: Vec<f64>, statistics: &[&str]) {
    values.sort_by(f64::total_cmp);
    let count = &object[format!("count_{metric}")];
    assert_eq!(count.as_u64(), Some(values.len() as u64), "count of {metric}");
    for statistic in statistics {
        let name = format!("{statistic}_{metric}_ms");
        let saved = object.get(&name).unwrap_or_else(|| panic!("{name} is missing"));
        if values.is_empty() {
            assert!(saved.is_null(), "{name} of nothing is {saved}");
            continue;
        }
        let want = match *statistic {
            "avg" => values.iter().sum::<f64>() / values.len() as f64,
            "max" => values[values.len() - 1],
            quantile => percentile(&values, quantile[1..].parse::<f64>().unwrap() / 100.0),
        };
        near(saved.as_f64().unwrap(), want, want.abs() * 1e-9 + 1e-9, &name);
    }
}

fn floats(rows: &[&Value], name: &str) -> Vec<f64> {
    rows.iter().filter_map(|row| row[name].as_f64()).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Each gap as often as its event had tokens, shared among them.
fn gaps_by_token(rows: &[&Value]) -> Vec<f64> {
    let mut gaps = Vec::new();
    for row in rows {
        let tokens = row["event_tokens"].as_array().unwrap();
        let of_row = row["event_gaps_ms"].as_array().unwrap();
        assert_eq!(of_row.len() + 1, tokens.len(), "{row}");
        for (gap, tokens) in of_row.iter().zip(&tokens[1..]) {
            let tokens = tokens.as_f64().unwrap();
            assert_eq!(tokens.fract(), 0.0, "the simulator's words are whole tokens: {row}");
            let whole: usize = tokens.to_string().parse().unwrap();
            gaps.extend(std::iter::repeat_n(gap.as_f64().unwrap() / tokens, whole));
        }
    }
    gaps
}

const ALL: [&str; 6] = ["avg", "p50", "p90", "p95", "p99", "max"];
const FROM_DUE: [(&str, &str); 3] =
    [("ttft_from_due", "ttft_ms"), ("fc_from_due", "fc_ms"), ("latency_from_due", "latency_ms")];

#[track_caller]
fn statistics_are_of(saved: &Saved, phase: &str) {
    let rows = saved.phase(phase);
    let ok: Vec<&Value> = rows.iter().filter(|row| row["outcome"] == "ok").copied().collect();
    let sent: Vec<&Value> = rows.iter().filter(|row| !row["sent_ms"].is_null()).copied().collect();
    let stats = saved.at("/stats");
    for metric in ["ttft", "fc", "tpot", "latency"] {
        has_figures_of(stats, metric, floats(&ok, &format!("{metric}_ms")), &ALL);
    }
    for metric in ["dispatch_lag", "cap_wait"] {
        has_figures_of(stats, metric, floats(&sent, &format!("{metric}_ms")), &ALL);
    }
    for (metric, name) in FROM_DUE {
        let late =
            |row: &&Value| Some(row[name].as_f64()? + row["sent_ms"].as_f64()? - row["due_ms"].as_f64()?);
        has_figures_of(stats, metric, ok.iter().filter_map(late).collect(), &ALL);
    }
    let pooled = ok.iter().flat_map(|row| row["event_gaps_ms"].as_array().unwrap());
    has_figures_of(stats, "icl", pooled.map(|gap| gap.as_f64().unwrap()).collect(), &ALL);
    has_figures_of(stats, "itl", gaps_by_token(&ok), &ALL);
    for (name, of) in [("avg_input_tokens", "input_tokens"), ("avg_output_tokens", "output_tokens")] {
        near(stats[name].as_f64().unwrap(), mean(&floats(&ok, of)), 1e-9, name);
    }
    let failed = rows.len() - ok.len();
    near(stats["error_rate"].as_f64().unwrap(), failed as f64 / rows.len() as f64, 1e-12, "error_rate");
    for turn in saved.at("/per_turn").as_array().unwrap() {
        let of_turn: Vec<&Value> = ok.iter().filter(|row| row["turn"] == turn["turn"]).copied().collect();
        assert_eq!(turn["count"].as_u64(), Some(of_turn.len() as u64));
        for metric in ["ttft", "fc", "tpot", "latency"] {
            has_figures_of(turn, metric, floats(&of_turn, &format!("{metric}_ms")), &["avg", "p50", "p99"]);
        }
        has_figures_of(turn, "itl", gaps_by_token(&of_turn), &["avg", "p50", "p99"]);
        let isl = floats(&of_turn, "input_tokens");
        assert_eq!(turn["avg_isl"].as_f64(), (!isl.is_empty()).then(|| mean(&isl)));
    }
}

/// Every statistic has its count, here and in each turn.
#[track_caller]
fn counts_stand_beside(saved: &Saved) {
    let turns = saved.at("/per_turn").as_array().unwrap();
    for object in turns.iter().chain([saved.at("/stats")]) {
        for name in object.as_object().unwrap().keys() {
            // The two ends of an interval are of the values of what it is around.
            let around = name.strip_prefix("ci95_low_").or_else(|| name.strip_prefix("ci95_high_"));
            let name = around.unwrap_or(name);
            let Some((_, metric)) = name.strip_suffix("_ms").and_then(|name| name.split_once('_')) else {
                continue;
            };
            assert!(object[format!("count_{metric}")].is_u64(), "{name} has no count");
        }
    }
}

#[test]
fn a_rates_statistics_are_those_of_its_measured_requests() {
    let sim = "--ttft-ms 15 --ttft-dist lognormal --itl-ms 2 --itl-dist normal --prefill-us-per-token 0";
    let load = "--request-rate 60 --duration 3 --warm-up 0.7 --arrival poisson --save-events";
    let finished = run(&[sim], &["--isl 300 --osl 24 --num-turns 2", load]);
    let saved = &finished.saved;
    statistics_are_of(saved, "measured");
    counts_stand_beside(saved);
    assert!(saved.count("/stats/count_fc") > 50, "the sixteenth of 24 events");
    // Rates count what happened within the measured part, whichever request it belongs to.
    let inside = |ms: f64| (700.0..3000.0).contains(&ms);
    let (mut tokens, mut input, mut completed) = (0.0, 0.0, 0.0);
    for row in saved.rows().iter().filter(|row| row["outcome"] == "ok") {
        let mut at = row["sent_ms"].as_f64().unwrap() + row["ttft_ms"].as_f64().unwrap();
        tokens += f64::from(u8::from(inside(at)));
        for gap in row["event_gaps_ms"].as_array().unwrap() {
            at += gap.as_f64().unwrap();
            tokens += f64::from(u8::from(inside(at)));
        }
        if inside(row["completed_ms"].as_f64().unwrap()) {
            completed += 1.0;
            input += row["input_tokens"].as_f64().unwrap();
        }
    }
    near(saved.number("/benchmark/measured_s"), 2.3, 1e-9, "measured_s");
    // Sums of rounded milliseconds may put a token on the other side of an end.
    near(saved.number("/stats/throughput_tok_s"), tokens / 2.3, 1.0, "throughput_tok_s");
    near(saved.number("/stats/input_throughput_tok_s"), input / 2.3, 1e-6, "input_throughput_tok_s");
    near(saved.number("/stats/measured_request_rate"), completed / 2.3, 1e-9, "measured_request_rate");
    tells_the_simulators_times(&finished);
}

/// What we measured lies around what the simulator did: never before it, and seldom much later.
fn tells_the_simulators_times(finished: &Finished) {
    let by_turn = finished.truth.by_turn();
    let (mut first, mut whole) = (Vec::new(), Vec::new());
    for row in finished.saved.phase("measured") {
        let line = by_turn[&key(row)];
        let at = |name: &str| line[name].as_f64().unwrap() / 1e6;
        let (ttft, latency) = (row["ttft_ms"].as_f64().unwrap(), row["latency_ms"].as_f64().unwrap());
        first.push(ttft - (at("first_write_ns") - at("first_byte_ns")));
        whole.push(latency - (at("last_write_ns") - at("first_byte_ns")));
    }
    let usual = finished.saved.number("/stats/p50_ttft_ms");
    for mut more in [first, whole] {
        more.sort_by(f64::total_cmp);
        assert!(more[0] > 0.0, "{} ms less than the simulator took", more[0]);
        let median = percentile(&more, 0.5);
        assert!(median < usual / 2.0, "{median} ms more than the simulator took, of a TTFT of {usual} ms");
    }
}

#[test]
fn several_tokens_an_event_are_told_apart_from_several_events() {
    let sim = "--ttft-ms 5 --itl-ms 1 --prefill-us-per-token 0 --tokens-per-event 4";
    let load = "--concurrency 4 --num-sessions 24 --save-events";
    let finished = run(&[sim], &["--isl 200 --osl 22 --num-turns 2", load]);
    let saved = &finished.saved;
    statistics_are_of(saved, "measured");
    counts_stand_beside(saved);
    for row in saved.rows() {
        assert_eq!((&row["events"], &row["output_tokens"]), (&Value::from(6), &Value::from(22)));
        assert!(row["fc_ms"].is_null(), "there is no sixteenth event");
    }
    assert_eq!(saved.count("/stats/count_fc"), 0);
    let (icl, itl) = (saved.number("/stats/avg_icl_ms"), saved.number("/stats/avg_itl_ms"));
    assert!(icl > 2.0 * itl, "{icl} ms between events, {itl} ms between tokens");
}

#[test]
fn failures_have_no_latency_and_the_rest_is_of_the_successes() {
    // Turn 3 of 4 is longer than the server takes.
    let sim = "--ttft-ms 3 --itl-ms 0.1 --prefill-us-per-token 0 --max-model-len 480";
    let load = "--concurrency 4 --num-sessions 24 --save-events";
    let finished = run(&[sim], &["--isl 400 --osl 10 --num-turns 4", load]);
    let saved = &finished.saved;
    let measured = saved.phase("measured");
    let failed: Vec<&Value> = measured.iter().filter(|row| row["outcome"] != "ok").copied().collect();
    assert!(failed.len() > 5 && failed.len() < measured.len(), "{} of {}", failed.len(), measured.len());
    let of_turn_4 = &saved.at("/per_turn")[3];
    assert_eq!(of_turn_4["count"], 0, "a session whose turn failed ends");
    statistics_are_of(saved, "measured");
    counts_stand_beside(saved);
    for row in failed {
        assert_eq!((&row["outcome"], &row["http_status"]), (&"http_status".into(), &400.into()), "{row}");
        assert_eq!(row["turn"], 3);
        for name in ["ttft_ms", "fc_ms", "tpot_ms", "itl_ms", "latency_ms", "output_tokens", "cached_tokens"]
        {
            assert!(row[name].is_null(), "{name}: {row}");
        }
        assert!(row["completed_ms"].is_number(), "a failure is a completion");
    }
    let by_status: BTreeMap<u64, usize> =
        finished.truth.turns.iter().fold(BTreeMap::new(), |mut counts, line| {
            *counts.entry(line["status"].as_u64().unwrap()).or_default() += 1;
            counts
        });
    assert_eq!(saved.count("/benchmark/failed_requests"), by_status[&400] as u64);
    let kinds = saved.at("/failures/kinds");
    assert_eq!((&kinds[0]["outcome"], &kinds[0]["count"]), (&"http_status".into(), &by_status[&400].into()));
    assert!(saved.reasons().contains(&"errors"), "{:?}", saved.reasons());
}
