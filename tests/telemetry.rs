//! The server's own metrics in the report, against the simulator's log of what it counted.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{FAST, Finished, Saved, Sim, TEMPLATE, benchctl, near, run};

const WORKLOAD: &str = "--isl 600 --osl 16 --hit-rate 0.6 --num-turns 3 --shared-system-prompt-ratio 0.5";

/// What the simulator's log says over all requests of sessions.
fn truth(finished: &Finished, name: &str) -> u64 {
    finished.truth.turns.iter().map(|line| line[name].as_u64().unwrap()).sum()
}

#[test]
fn the_counters_over_the_whole_run_are_exactly_those_of_the_simulators_log() {
    for load in ["--concurrency 6 --num-sessions 40", "--request-rate 50 --duration 3 --warm-up 1"] {
        let finished = run(&[TEMPLATE, FAST], &[WORKLOAD, load]);
        let saved = &finished.saved;
        let (queries, hits) = (truth(&finished, "prompt_tokens"), truth(&finished, "cached_tokens"));
        assert_eq!(saved.count("/server/whole_run/cache_queries"), queries, "{load}");
        assert_eq!(saved.count("/server/whole_run/cache_hits"), hits, "{load}");
        assert_eq!(saved.count("/server/whole_run/prompt_tokens"), queries, "{load}");
        let output = truth(&finished, "completion_tokens");
        assert_eq!(saved.count("/server/whole_run/generation_tokens"), output, "{load}");
        assert_eq!(saved.count("/server/whole_run/ttft_count"), finished.truth.turns.len() as u64, "{load}");
        // And so are the sums over usage.
        assert_eq!(saved.count("/server/own_prompt_tokens"), queries, "{load}");
        assert_eq!(saved.count("/server/own_cached_tokens"), hits, "{load}");
        let hit_rate = hits as f64 / queries as f64;
        near(saved.number("/hit_rate/counted_whole_run"), hit_rate, 1e-12, load);
        near(saved.number("/hit_rate/reported_whole_run"), hit_rate, 1e-12, load);
    }
}

#[test]
fn the_window_begins_with_the_measured_part_and_counts_what_was_read_in_it() {
    let load = "--request-rate 50 --duration 4 --warm-up 1.5";
    let finished = run(&[TEMPLATE, FAST], &[WORKLOAD, load]);
    let saved = &finished.saved;
    let (from_ms, to_ms) =
        (saved.number("/hit_rate/counted_from_ms"), saved.number("/hit_rate/counted_to_ms"));
    assert_eq!(saved.number("/server/window/from_ms"), from_ms);
    let measured = saved.phase("measured");
    let completed = measured.iter().map(|row| row["completed_ms"].as_f64().unwrap()).fold(0.0, f64::max);
    assert!(from_ms >= 1500.0 && to_ms >= completed, "from {from_ms} to {to_ms}, completed {completed}");
    // The simulator's clock is ours. What was read around the instant of a scrape may be on either side of it.
    let origin_ms = saved.number("/environment/origin_monotonic_ns") / 1e6;
    let read_in = |from_ms: f64, to_ms: f64| -> f64 {
        let at = |line: &Value| line["read_ns"].as_f64().unwrap() / 1e6 - origin_ms;
        let inside = finished.truth.turns.iter().filter(|line| (from_ms..to_ms).contains(&at(line)));
        inside.map(|line| line["prompt_tokens"].as_f64().unwrap()).sum()
    };
    let queries = saved.number("/server/window/cache_queries");
    // It is answered within 1 s, the last within 3 s, and a lookup follows the reading of its request.
    let slack_ms = 1000.0;
    let bounds =
        (read_in(from_ms + slack_ms, to_ms - slack_ms), read_in(from_ms - slack_ms, to_ms + 3.0 * slack_ms));
    assert!((bounds.0..=bounds.1).contains(&queries), "{queries} in {bounds:?}");
    // Three turns in even shares: the window's requests are as the measured ones.
    near(saved.number("/hit_rate/counted"), saved.number("/hit_rate/reported"), 0.05, "counted and reported");
}

#[test]
fn a_server_that_queues_is_seen_to() {
    let sim = "--ttft-ms 50 --itl-ms 5 --slots 2 --cache-blocks 400";
    let finished = run(&[TEMPLATE, sim], &["--isl 300 --osl 20 --concurrency 8 --num-sessions 100"]);
    let saved = &finished.saved;
    assert_eq!(saved.number("/server/window/running/max"), 2.0);
    assert!(saved.number("/server/window/waiting/max") <= 6.0);
    assert!(saved.number("/server/window/waiting/mean") > 3.0, "{}", saved.at("/server/window/waiting"));
    let kv = saved.number("/server/window/kv_cache_usage/max");
    assert!(kv > 0.0 && kv <= 1.0, "{kv}");
    // Both see the queue, and ours is of the same requests.
    let (theirs, ours) =
        (saved.number("/server/window/avg_ttft_ms"), saved.number("/server/window/client_avg_ttft_ms"));
    assert!(theirs > 300.0 && ours > 0.9 * theirs, "{theirs} ms there, {ours} ms here");
}

#[test]
fn samples_come_once_a_second_and_their_counters_never_go_back() {
    let finished = run(&[TEMPLATE, FAST], &[WORKLOAD, "--request-rate 20 --duration 3.5"]);
    let samples = finished.saved.at("/server_samples").as_array().unwrap();
    let number = |name: &'static str| samples.iter().map(move |sample| sample[name].as_f64().unwrap());
    // Before, at the start of the measured part, after 1, 2 and 3 s, and after; fewer on a machine that is late.
    let most = 4.0 + finished.saved.number("/benchmark/duration_s");
    assert!(samples.len() >= 4 && samples.len() as f64 <= most, "{} samples", samples.len());
    assert!(number("at_ms").next().unwrap() <= 0.0);
    for name in ["at_ms", "cache_queries", "cache_hits", "prompt_tokens", "generation_tokens", "ttft_count"] {
        assert!(number(name).is_sorted(), "{name}");
    }
    assert_eq!(finished.saved.count("/server/scrapes"), samples.len() as u64);
}

/// Why the counted hit rate is missing from a run with these arguments.
fn why_missing(sim: &Sim, line: &str) -> (String, Saved) {
    let file = sim.folder.path().join("missing.json");
    let ran = benchctl(&[
        "run --force -u",
        &sim.url,
        "--tokenizer builtin --save-result",
        file.to_str().unwrap(),
        line,
    ]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let saved = Saved::read(&file);
    assert_eq!(*saved.at("/hit_rate/counted"), Value::Null);
    let why = saved.at("/hit_rate/counted_missing").as_str().unwrap().to_owned();
    assert!(ran.stdout.contains(&format!("not counted: {why}")), "{}", ran.stdout);
    (why, saved)
}

#[test]
fn metrics_that_are_off_or_not_there_are_missing_with_the_reason() {
    let sim = Sim::start(&[TEMPLATE, FAST]);
    let load = "--isl 200 --osl 4 --concurrency 2 --num-sessions 4";
    let (why, saved) = why_missing(&sim, &format!("{load} --metrics-url off"));
    assert_eq!(why, "the server's metrics were switched off");
    assert_eq!(*saved.at("/server/metrics_url"), Value::Null);
    assert_eq!(saved.at("/server_samples").as_array().unwrap().len(), 0);
    let (why, _) = why_missing(&sim, &format!("{load} --metrics-url {}/nothing", sim.url));
    assert_eq!(why, format!("{}/nothing answers with status 404", sim.url));
    let (why, _) = why_missing(&sim, &format!("{load} --metrics-url {}/health", sim.url));
    assert_eq!(why, format!("{}/health has no metric of vLLM, SGLang or llama.cpp", sim.url));
}

#[test]
fn with_other_traffic_on_the_server_its_counters_are_not_taken_for_ours() {
    let sim = Sim::start(&[TEMPLATE, FAST]);
    let url = sim.url.clone();
    let (why, saved) = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            sim.until_ended(5);
            benchctl(&[
                "run -q -u",
                &url,
                "--tokenizer builtin --isl 400 --osl 2 --concurrency 4 --num-sessions 40",
            ])
        });
        let ours = why_missing(&sim, "--isl 200 --osl 4 --request-rate 20 --duration 6");
        assert_eq!(other.join().unwrap().code, Some(0));
        ours
    });
    assert!(why.contains("others used it too"), "{why}");
    assert!(saved.count("/server/whole_run/cache_queries") > saved.count("/server/own_prompt_tokens"));
}
