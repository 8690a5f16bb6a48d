//! The same seed gives the same messages and the same instants, however many threads make them; shown by the digests
//! of the messages that the simulator received, not by our own hash.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use support::{FAST, Finished, Key, TEMPLATE, run};

const WORKLOAD: &str = "--isl 300 --osl 8 --hit-rate 0.6 --num-turns 3 --shared-system-prompt-ratio 0.3";
const CLOSED: &str = "--concurrency 5 --num-sessions 20";
const OPEN: &str = "--request-rate 60 --duration 2 --arrival poisson";

fn made(lines: &[&str]) -> Finished {
    let mut all = vec![WORKLOAD];
    all.extend_from_slice(lines);
    run(&[TEMPLATE, FAST, "--reply fixed"], &all)
}

fn digests(finished: &Finished) -> BTreeMap<Key, String> {
    finished.truth.by_turn().into_iter().map(|(key, line)| (key, line["digest"].to_string())).collect()
}

fn dues(finished: &Finished) -> Vec<String> {
    let mut dues: Vec<f64> =
        finished.saved.rows().iter().map(|row| row["due_ms"].as_f64().unwrap()).collect();
    dues.sort_by(f64::total_cmp);
    dues.iter().map(f64::to_string).collect()
}

#[test]
fn a_seed_fixes_every_message_of_every_session_for_any_number_of_threads() {
    let one = made(&[CLOSED, "--seed 11 --num-workers 1"]);
    let four = made(&[CLOSED, "--seed 11 --num-workers 4"]);
    assert!(digests(&one).len() > 20 * 3, "twenty whole sessions and five cut ones");
    assert_eq!(digests(&one), digests(&four));
    assert_eq!(one.saved.at("/environment/plan_hash"), four.saved.at("/environment/plan_hash"));
    assert_eq!(one.saved.at("/config/seed"), 11);
}

#[test]
fn a_seed_fixes_every_due_instant_for_any_number_of_threads() {
    let one = made(&[OPEN, "--seed 11 --num-workers 1"]);
    let four = made(&[OPEN, "--seed 11 --num-workers 4"]);
    assert!(dues(&one).len() > 80);
    assert_eq!(dues(&one), dues(&four));
    // Which turn a slot takes depends on when answers come; what a turn says does not.
    let (one, four) = (digests(&one), digests(&four));
    let common = one.keys().filter(|key| four.contains_key(key)).count();
    assert!(common > one.len() / 2, "{common} of {} in both", one.len());
    for (key, digest) in &one {
        assert!(four.get(key).is_none_or(|other| other == digest), "{key:?}");
    }
}

#[test]
fn another_seed_or_none_gives_other_messages_and_instants() {
    let runs = [made(&[OPEN, "--seed 11"]), made(&[OPEN, "--seed 12"]), made(&[OPEN]), made(&[OPEN])];
    let mut seeds = BTreeSet::new();
    let mut hashes = BTreeSet::new();
    for (i, run) in runs.iter().enumerate() {
        let seed = run.saved.count("/config/seed");
        seeds.insert(seed);
        hashes.insert(run.saved.at("/environment/plan_hash").to_string());
        assert!(run.ran.stdout.contains(&format!("seed {seed}")), "the seed is printed");
        let mine: BTreeSet<String> = digests(run).into_values().collect();
        for other in &runs[..i] {
            assert!(mine.is_disjoint(&digests(other).into_values().collect()));
            assert_ne!(dues(run), dues(other));
        }
    }
    assert_eq!((seeds.len(), hashes.len()), (4, 4));
}

#[test]
fn a_fresh_seed_that_was_shown_gives_the_run_again() {
    let first = made(&[CLOSED]);
    let again = made(&[CLOSED, "--seed", &first.saved.count("/config/seed").to_string()]);
    assert_eq!(digests(&first), digests(&again));
}
