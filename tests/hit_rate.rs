//! Hit rates: what the simulator's cache held of the measured requests, against what the plan and the report say.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use support::{FAST, Finished, TEMPLATE, key, near, run};

const WORKLOAD: &str = "--isl 1000 --osl 64 --hit-rate 0.7 --num-turns 4 --shared-system-prompt-ratio 0.5";
const CLOSED: &str = "--concurrency 8 --num-sessions 48";
/// Half of a percentage point.
const HALF_A_POINT: f64 = 0.005;

/// Cached tokens / prompt tokens of the measured requests, by the simulator's own log.
fn measured_hit_rate(finished: &Finished) -> f64 {
    let by_turn = finished.truth.by_turn();
    let measured = finished.saved.phase("measured");
    assert!(measured.len() > 80, "{} measured", measured.len());
    let sum =
        |name: &str| -> f64 { measured.iter().map(|row| by_turn[&key(row)][name].as_f64().unwrap()).sum() };
    sum("cached_tokens") / sum("prompt_tokens")
}

/// What the report calls reported is what the simulator's cache really held.
#[track_caller]
fn reported_is_true(finished: &Finished) -> f64 {
    let truth = measured_hit_rate(finished);
    near(finished.saved.number("/hit_rate/reported"), truth, 1e-9, "reported");
    truth
}

#[test]
fn a_closed_loop_meets_its_target_on_a_cache_of_single_tokens() {
    let finished = run(&[TEMPLATE, FAST, "--block-size 1"], &[WORKLOAD, CLOSED, "--block-size 1"]);
    let truth = reported_is_true(&finished);
    near(truth, finished.saved.number("/hit_rate/planned"), HALF_A_POINT, "truth and plan");
    near(
        truth,
        finished.saved.number("/hit_rate/planned_by_blocks"),
        HALF_A_POINT,
        "truth and plan by blocks",
    );
    // Which turns were measured moves the target of some fifty sessions by a point.
    near(truth, 0.7, 0.015, "truth and target");
    assert_eq!(finished.saved.number("/hit_rate/first_turn_unexpected"), 0.0);
}

#[test]
fn a_rate_meets_its_target_on_a_cache_of_single_tokens() {
    let rate = "--request-rate 60 --duration 5.5 --warm-up 2.5 --osl 16";
    let workload = "--isl 1000 --hit-rate 0.7 --num-turns 4 --shared-system-prompt-ratio 0.5";
    let finished = run(&[TEMPLATE, FAST, "--block-size 1"], &[workload, rate]);
    let truth = reported_is_true(&finished);
    near(truth, finished.saved.number("/hit_rate/planned"), HALF_A_POINT, "truth and plan");
    near(truth, 0.7, 0.01, "truth and target");
}

// With one turn the template's end, after the shared text, is of no session's cache.
#[test]
fn single_turns_share_their_system_prompt_to_the_token() {
    let load = "--concurrency 8 --num-sessions 120 --isl 200 --osl 4 --num-turns 1 --hit-rate 0.5";
    let finished = run(&[TEMPLATE, FAST, "--block-size 1"], &[load, "--block-size 1"]);
    let truth = reported_is_true(&finished);
    near(truth, finished.saved.number("/hit_rate/planned"), 1e-9, "truth and plan");
}

#[test]
fn a_cache_of_whole_blocks_serves_what_the_plan_by_blocks_says() {
    for block_size in ["16", "64"] {
        let sim = format!("--block-size {block_size}");
        let finished = run(&[TEMPLATE, FAST, &sim], &[WORKLOAD, CLOSED, &sim]);
        let truth = reported_is_true(&finished);
        near(truth, finished.saved.number("/hit_rate/planned_by_blocks"), HALF_A_POINT, &sim);
    }
}

#[test]
fn replies_that_end_early_lower_the_hit_rate_to_the_expected_one() {
    let sim = [TEMPLATE, FAST, "--block-size 1 --early-stop 0.6"];
    let finished = run(&sim, &[WORKLOAD, CLOSED, "--block-size 1"]);
    let truth = reported_is_true(&finished);
    let (planned, expected) =
        (finished.saved.number("/hit_rate/planned"), finished.saved.number("/hit_rate/expected"));
    near(truth, expected, HALF_A_POINT, "truth and expected");
    assert!(planned - expected > HALF_A_POINT, "{expected} is expected of {planned} planned");
}

#[test]
fn prompts_of_one_turn_without_sharing_have_nothing_in_common() {
    let sim = "--template-request 0 --template-message 0 --template-reply 0 --block-size 1";
    let finished = run(&[FAST, sim], &["--isl 1000 --osl 2 --hit-rate 0 --concurrency 8 --num-sessions 200"]);
    let sum =
        |name: &str| -> f64 { finished.truth.turns.iter().map(|line| line[name].as_f64().unwrap()).sum() };
    let hit_rate = sum("cached_tokens") / sum("prompt_tokens");
    assert!(hit_rate < 0.001, "{hit_rate} of {} prompts", finished.truth.turns.len());
    reported_is_true(&finished);
}

#[test]
fn prompts_that_the_server_already_held_are_named() {
    let sim = support::Sim::start(&[TEMPLATE, FAST]);
    let line = "--isl 500 --osl 2 --concurrency 4 --num-sessions 30 --tokenizer builtin --seed 5 --json -q";
    let first = support::benchctl(&["run -u", &sim.url, line]);
    let again = support::benchctl(&["run -u", &sim.url, line]);
    let codes = |ran: &support::Ran| {
        let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        report["verdict"]["reasons"].to_string()
    };
    assert!(!codes(&first).contains("already_cached"), "{first:?}");
    assert!(codes(&again).contains("already_cached"), "{again:?}");
}
