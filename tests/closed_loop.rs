//! The closed loop: how many sessions run, which of them count, and how it ends.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;

use serde_json::Value;
use support::{FAST, Finished, Saved, Sim, benchctl, key, number, run};

const TURNS: &str = "--isl 300 --osl 8 --num-turns 3";
const FIRST_GENERATION: u64 = 6;

/// The file's phases add up, hold the same requests as the simulator's log, and only one of them is in the statistics.
#[track_caller]
fn phases_add_up(finished: &Finished) {
    let Finished { saved, truth, .. } = finished;
    let count = |name: &str| saved.count(&format!("/benchmark/{name}"));
    let total = count("warmup_requests") + count("measured_requests") + count("drain_requests");
    assert_eq!((count("total_requests"), saved.rows().len() as u64), (total, total));
    for (phase, name) in
        [("warm_up", "warmup_requests"), ("measured", "measured_requests"), ("drain", "drain_requests")]
    {
        assert_eq!(saved.phase(phase).len() as u64, count(name), "{phase}");
    }
    let by_turn = truth.by_turn();
    assert_eq!(by_turn.len() as u64, total);
    assert!(saved.rows().iter().all(|row| by_turn.contains_key(&key(row))));
    for metric in ["ttft", "latency", "dispatch_lag", "ttft_from_due"] {
        assert_eq!(saved.count(&format!("/stats/count_{metric}")), count("measured_requests"), "{metric}");
    }
    let of_turns =
        saved.at("/per_turn").as_array().unwrap().iter().map(|turn| turn["count"].as_u64().unwrap());
    assert_eq!(of_turns.sum::<u64>(), count("measured_requests"));
}

/// Turns of each session, as they arrived.
fn turns_of_sessions(finished: &Finished) -> BTreeMap<u64, u64> {
    let mut turns = BTreeMap::new();
    for line in &finished.truth.turns {
        *turns.entry(number(&line["session"])).or_default() += 1;
    }
    turns
}

fn is_from_the_first_generation(row: &&Value) -> bool {
    number(&row["session_id"]) < FIRST_GENERATION
}

#[test]
fn so_many_sessions_run_after_the_first_generation() {
    let finished = run(&[FAST], &[TURNS, "--concurrency 6 --num-sessions 20"]);
    phases_add_up(&finished);
    let turns = turns_of_sessions(&finished);
    assert_eq!(turns.len(), 6 + 20);
    let mut cut: Vec<u64> = turns.range(..FIRST_GENERATION).map(|(_, turns)| *turns).collect();
    cut.sort_unstable();
    assert_eq!(cut, [1, 1, 2, 2, 3, 3], "the first generation is cut to every length alike");
    assert!(turns.range(FIRST_GENERATION..).all(|(_, turns)| *turns == 3), "{turns:?}");
    assert_eq!(finished.truth.most_at_a_time(), 6);
    let saved = &finished.saved;
    assert_eq!(saved.count("/load/sessions_completed"), 26);
    assert_eq!(saved.at("/benchmark/steady_state_reached"), true);
    assert!(saved.count("/benchmark/drain_requests") > 0, "the pool shrinks at the end");
    let measured = saved.phase("measured");
    assert_eq!(
        measured.into_iter().filter(is_from_the_first_generation).count(),
        0,
        "cut sessions are warm-up"
    );
}

#[test]
fn a_number_of_requests_ends_the_loop_and_all_of_them_are_answered() {
    let finished = run(&[FAST], &[TURNS, "--concurrency 6 --num-requests 40"]);
    phases_add_up(&finished);
    let whole = finished.truth.turns.iter().filter(|line| number(&line["session"]) >= FIRST_GENERATION);
    assert_eq!(whole.count(), 40);
    assert!(finished.saved.rows().iter().all(|row| row["outcome"] == "ok"));
    assert_eq!(finished.saved.at("/benchmark/is_partial"), false);
}

// The measured part ends when the next turn would have been due, not when the last one was sent.
#[test]
fn a_few_requests_are_no_more_a_second_than_the_server_can_answer() {
    for requests in [1, 5] {
        let line = format!("{TURNS} --concurrency 1 --num-requests {requests}");
        let saved = run(&["--ttft-ms 50 --itl-ms 5"], &[&line]).saved;
        let latency_s = saved.number("/stats/avg_latency_ms") / 1000.0;
        let at_a_time = saved.number("/stats/measured_request_rate") * latency_s;
        assert!(at_a_time > 0.2 && at_a_time < 1.05, "{at_a_time} at a time, for {requests} requests");
    }
}

#[test]
fn a_closed_loop_does_not_run_away_from_a_server_that_refuses_at_once() {
    let sim = Sim::start(&["--ttft-ms 5 --itl-ms 1 --fault status:503=1"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    let line = format!("run -u {} --tokenizer builtin --save-result {}", sim.url, file.display());
    let ran = benchctl(&[&line, TURNS, "--concurrency 4 --duration 2"]);
    assert_eq!(ran.code, Some(5), "{ran:?}");
    let saved = Saved::read(&file);
    // Without a pause there are thousands; with it, at most a few in the time that it takes to reach a second.
    let count = saved.rows().len();
    assert!((4..200).contains(&count), "{count} requests");
    assert_eq!(saved.count("/benchmark/failed_requests"), count as u64);
}

#[test]
fn a_duration_ends_the_loop_and_nothing_falls_due_after_it() {
    let finished = run(&["--ttft-ms 20 --itl-ms 1"], &[TURNS, "--concurrency 6 --duration 1.5"]);
    phases_add_up(&finished);
    let saved = &finished.saved;
    assert!(saved.rows().len() > 60, "{} requests", saved.rows().len());
    for row in saved.rows() {
        assert_eq!(row["outcome"], "ok", "what was in flight at the end was awaited");
        assert!(row["due_ms"].as_f64().unwrap() < 1500.0, "{row}");
    }
    assert!(saved.number("/benchmark/measured_s") < 1.5);
    assert!(!saved.phase("measured").is_empty());
}

#[test]
fn think_time_lies_between_an_answer_and_the_next_turn() {
    let finished = run(&[FAST], &[TURNS, "--concurrency 6 --num-sessions 6 --think-time 0.2"]);
    phases_add_up(&finished);
    let rows: BTreeMap<(u64, u64), &Value> =
        finished.saved.rows().iter().map(|row| (key(row), row)).collect();
    let mut thought = 0;
    for ((session, turn), row) in &rows {
        let Some(next) = rows.get(&(*session, turn + 1)) else { continue };
        let pause = next["due_ms"].as_f64().unwrap() - row["completed_ms"].as_f64().unwrap();
        support::near(pause, 200.0, 0.001, "think time");
        thought += 1;
    }
    assert!(thought >= 12, "{thought}");
    let starts: Vec<f64> =
        rows.iter().filter(|(key, _)| key.1 == 1).map(|(_, row)| row["due_ms"].as_f64().unwrap()).collect();
    for i in 0..FIRST_GENERATION {
        let due = i as f64 * 200.0 / 6.0;
        assert!(
            starts.iter().any(|start| (start - due).abs() < 0.001),
            "a session starts at {due} ms: {starts:?}"
        );
    }
}

#[test]
fn a_run_that_never_got_steady_says_so_and_shows_statistics_of_all() {
    let finished = run(&[FAST], &[TURNS, "--concurrency 6 --num-sessions 1"]);
    let Finished { saved, ran, .. } = &finished;
    assert_eq!(saved.at("/benchmark/statistics_of_all"), true, "{}", saved.at("/benchmark"));
    assert_eq!(saved.count("/stats/count_ttft"), saved.rows().len() as u64);
    let says = |saved: &Saved| {
        saved.reasons().contains(&"no_steady_state") || saved.reasons().contains(&"nothing_measured")
    };
    assert!(says(saved), "{:?}", saved.reasons());
    assert!(ran.stdout.starts_with("verdict: suspect"), "{}", ran.stdout);
}
