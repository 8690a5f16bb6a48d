//! The open loop: slots go out at the rate whatever the server does, every turn gets its share, and what the caps
//! hold back or refuse is told apart. The simulator's log says what really arrived.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;

use serde_json::Value;
use support::{FAST, Finished, Saved, near, run};

const TURNS: &str = "--isl 400 --osl 4 --num-turns 4";

/// Requests of each slot's row, by whether it was sent.
fn sent(saved: &Saved) -> Vec<&Value> {
    saved.rows().iter().filter(|row| !row["sent_ms"].is_null()).collect()
}

fn ms(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name} of {row}"))
}

/// Each slot is sent, refused or left over; and what was sent is what arrived.
#[track_caller]
fn slots_add_up(finished: &Finished) {
    let Finished { saved, truth, .. } = finished;
    let count = |name: &str| saved.count(&format!("/load/{name}"));
    assert_eq!(count("planned_slots"), count("sent") + count("refused") + count("unsent"));
    assert_eq!(count("sent"), truth.turns.len() as u64);
    assert_eq!(count("sent"), sent(saved).len() as u64);
    assert_eq!(saved.rows().len() as u64, count("sent") + count("refused"));
    assert_eq!(saved.count("/benchmark/total_requests"), saved.rows().len() as u64);
}

/// The instants of constant slots are i / rate.
#[track_caller]
fn dues_are_evenly_spaced(saved: &Saved, rate_per_s: f64) {
    let mut dues: Vec<f64> = saved.rows().iter().map(|row| ms(row, "due_ms")).collect();
    dues.sort_by(f64::total_cmp);
    for gap in dues.windows(2).map(|pair| pair[1] - pair[0]) {
        near(gap, 1000.0 / rate_per_s, 0.001, "gap between slots");
    }
}

#[test]
fn slots_go_out_at_the_rate_and_every_turn_gets_its_share() {
    let finished = run(&[FAST], &[TURNS, "--request-rate 60 --duration 8 --warm-up 3"]);
    slots_add_up(&finished);
    let saved = &finished.saved;
    assert_eq!(saved.count("/load/planned_slots"), 60 * 8);
    assert_eq!(saved.count("/load/sent"), 60 * 8);
    dues_are_evenly_spaced(saved, 60.0);
    let by_turn = finished.truth.by_turn();
    let mut shares: BTreeMap<u64, f64> = BTreeMap::new();
    let measured = saved.phase("measured");
    assert_eq!(measured.len(), 60 * 5);
    for row in &measured {
        assert!(by_turn.contains_key(&support::key(row)), "arrived: {row}");
        *shares.entry(row["turn"].as_u64().unwrap()).or_default() += 1.0 / measured.len() as f64;
    }
    assert_eq!(shares.len(), 4);
    for (turn, share) in &shares {
        near(*share, 0.25, 0.02, &format!("share of turn {turn}"));
        let reported = &saved.at("/load/turn_mix")[usize::try_from(turn - 1).unwrap()];
        near(reported["achieved"].as_f64().unwrap(), *share, 0.01, "reported share");
    }
    near(saved.number("/stats/avg_input_tokens"), 400.0, 8.0, "ISL");
    for warmth in ["warm_up", "measured"] {
        for row in saved.phase(warmth) {
            assert_eq!(ms(row, "due_ms") >= 3000.0, warmth == "measured", "{row}");
        }
    }
}

#[test]
fn random_arrivals_have_the_rate_of_the_plan() {
    for arrival in ["--arrival poisson", "--arrival gamma --burstiness 0.5"] {
        let finished = run(&[FAST], &["--isl 50 --osl 1", "--request-rate 200 --duration 2", arrival]);
        slots_add_up(&finished);
        let dues: Vec<f64> = finished.saved.rows().iter().map(|row| ms(row, "due_ms")).collect();
        // Five standard deviations of the burstier one.
        near(dues.len() as f64, 400.0, 5.0 * (2.0f64 * 400.0).sqrt(), "slots");
        assert!(dues.iter().all(|due| (0.0..2000.0).contains(due)));
        let uneven = dues.windows(2).filter(|pair| (pair[1] - pair[0] - 5.0).abs() > 1.0).count();
        assert!(uneven > dues.len() / 4, "{arrival}: {uneven} gaps are not the mean one");
    }
}

#[test]
fn a_server_too_slow_for_the_rate_lowers_neither_the_rate_nor_the_truth() {
    // Two places of 40 ms serve 50 requests a second.
    let sim = "--slots 2 --ttft-ms 40 --itl-ms 0 --prefill-us-per-token 0";
    let finished = run(&[sim], &[TURNS, "--request-rate 100 --duration 4 --warm-up 1"]);
    slots_add_up(&finished);
    let saved = &finished.saved;
    assert_eq!(saved.count("/load/sent"), 400);
    dues_are_evenly_spaced(saved, 100.0);
    near(saved.number("/load/sent_rate_per_s"), 100.0, 5.0, "rate sent");
    // By the simulator: all but the last second's requests arrived while the schedule lasted.
    let origin_ns = saved.count("/environment/origin_monotonic_ns");
    let arrived = |line: &&Value| line["first_byte_ns"].as_u64().unwrap() < origin_ns + 4_000_000_000;
    let in_time = finished.truth.turns.iter().filter(arrived).count();
    assert!(in_time >= 300, "{in_time} of 400 arrived in the four seconds of the schedule");
    assert!(saved.count("/load/sessions_beyond_plan") > 0);
    assert!(saved.number("/load/in_flight_growth_per_s") > 10.0);
    let reasons = saved.reasons();
    assert!(reasons.contains(&"beyond_plan") && reasons.contains(&"not_steady"), "{reasons:?}");
    let text = &finished.ran.stdout;
    assert!(text.contains("sessions started beyond plan"), "{text}");
    assert!(text.starts_with("verdict: suspect"), "{text}");
}

#[test]
fn a_slot_above_max_concurrency_waits_and_the_wait_is_not_called_lateness() {
    // Four places of 50 ms serve 80 requests a second.
    let sim = "--ttft-ms 50 --itl-ms 0 --prefill-us-per-token 0";
    let finished = run(&[sim], &[TURNS, "--request-rate 120 --duration 2 --max-concurrency 4"]);
    slots_add_up(&finished);
    let saved = &finished.saved;
    assert_eq!(saved.count("/load/sent"), 240);
    assert_eq!(finished.truth.most_at_a_time(), 4);
    dues_are_evenly_spaced(saved, 120.0);
    let mut in_order = sent(saved);
    in_order.sort_by(|a, b| ms(a, "due_ms").total_cmp(&ms(b, "due_ms")));
    // Each of the four places is a task of its own, and four that start at once may be stamped in any order.
    let pairs = in_order.iter().zip(&in_order[4..]);
    assert!(
        pairs.into_iter().all(|(a, b)| ms(a, "sent_ms") <= ms(b, "sent_ms")),
        "in the order of their slots"
    );
    let waited = in_order.iter().filter(|row| ms(row, "cap_wait_ms") > 0.0).count();
    assert!(waited > 200, "{waited} waited");
    for row in &in_order {
        let late = ms(row, "sent_ms") - ms(row, "due_ms");
        near(ms(row, "cap_wait_ms") + ms(row, "dispatch_lag_ms"), late, 0.001, "the two parts of lateness");
    }
    let lag = saved.number("/stats/p50_dispatch_lag_ms");
    let wait = saved.number("/stats/p50_cap_wait_ms");
    assert!(lag * 10.0 < wait, "{lag} ms of lateness, {wait} ms of waiting");
    let from_due = saved.number("/stats/avg_ttft_from_due_ms") - saved.number("/stats/avg_ttft_ms");
    assert!(from_due > 0.9 * saved.number("/stats/avg_cap_wait_ms"), "a user would have felt the wait");
}

#[test]
fn slots_that_never_got_a_place_are_counted_as_unsent() {
    let sim = "--ttft-ms 100 --itl-ms 0 --prefill-us-per-token 0";
    let load = "--request-rate 100 --duration 1 --max-concurrency 2 --drain-timeout 0.3";
    let finished = run(&[sim], &[TURNS, load]);
    slots_add_up(&finished);
    assert_eq!(finished.saved.count("/load/planned_slots"), 100);
    assert!(finished.saved.count("/load/unsent") > 30, "{}", finished.saved.at("/load"));
    let text = &finished.ran.stdout;
    assert!(text.contains("slots that still waited for a place at the end"), "{text}");
}

#[test]
fn a_slot_above_max_in_flight_is_refused_and_recorded() {
    let sim = "--ttft-ms 100 --itl-ms 0 --prefill-us-per-token 0";
    let finished = run(&[sim], &[TURNS, "--request-rate 100 --duration 2 --max-in-flight 4"]);
    slots_add_up(&finished);
    let saved = &finished.saved;
    assert_eq!(saved.count("/load/planned_slots"), 200);
    assert_eq!(finished.truth.most_at_a_time(), 4);
    let refused: Vec<&Value> = saved.rows().iter().filter(|row| row["outcome"] == "refused").collect();
    assert_eq!(refused.len() as u64, saved.count("/load/refused"));
    assert_eq!(refused.len() as u64, saved.count("/benchmark/refused_requests"));
    assert!(refused.len() > 50, "{}", refused.len());
    for row in refused {
        for name in ["session_id", "turn", "sent_ms", "completed_ms", "ttft_ms", "latency_ms", "input_tokens"]
        {
            assert!(row[name].is_null(), "{name}: {row}");
        }
    }
    dues_are_evenly_spaced(saved, 100.0);
    assert!(saved.reasons().contains(&"refused"), "{:?}", saved.reasons());
    assert_eq!(saved.count("/benchmark/failed_requests"), 0, "a refusal is no failure");
    assert_eq!(saved.number("/stats/error_rate"), 0.0);
}
