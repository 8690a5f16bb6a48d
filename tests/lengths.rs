//! Prompt lengths: what the simulator counted of every request of every session is what the plan says.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use support::{FAST, Finished, TEMPLATE, key, run, turn_of_truth};

const WORKLOAD: &str = "--isl 1000 --osl 64 --hit-rate 0.7 --num-turns 4 --shared-system-prompt-ratio 0.5";
const LOAD: &str = "--concurrency 8 --num-sessions 32";

/// Every request of every session as the simulator counted it, and every row of the file as it was.
#[track_caller]
fn is_exact(finished: &Finished) {
    let Finished { saved, truth, .. } = finished;
    assert!(truth.turns.len() > 130, "{} requests", truth.turns.len());
    for line in &truth.turns {
        assert_eq!(&line["prompt_tokens"], saved.planned_total(turn_of_truth(line)), "{line}");
    }
    let by_turn = truth.by_turn();
    assert_eq!(saved.rows().len(), by_turn.len());
    for row in saved.rows() {
        let line = by_turn[&key(row)];
        assert_eq!(row["outcome"], "ok", "{row}");
        assert_eq!(row["planned_input_tokens"], line["prompt_tokens"], "{row}");
        assert_eq!(row["input_tokens"], line["prompt_tokens"], "{row}");
        assert_eq!(row["output_tokens"], line["completion_tokens"], "{row}");
        assert_eq!(row["cached_tokens"], line["cached_tokens"], "{row}");
    }
    assert_eq!(saved.at("/load/residuals").as_object().unwrap().len(), 0);
    assert_eq!(saved.count("/load/exact_prompts"), saved.count("/benchmark/measured_requests"));
}

#[test]
fn every_prompt_has_exactly_the_planned_tokens() {
    let finished = run(&[TEMPLATE, FAST], &[WORKLOAD, LOAD]);
    is_exact(&finished);
    let totals = finished.saved.at("/spec/per_turn").as_array().unwrap().iter();
    let totals: Vec<u64> = totals.map(|turn| turn["total"].as_u64().unwrap()).collect();
    // By hand: u = 272 and s = 224 give an ISL of 1000 with 64 tokens of replies between them.
    assert_eq!(totals, [496, 832, 1168, 1504]);
    assert!(finished.truth.turns.iter().all(|line| line["completion_tokens"] == 64));
    assert_eq!(finished.saved.at("/preparation/template/first_turn_tokens"), 7 + 5 + 5 + 5);
    assert_eq!(finished.saved.at("/preparation/template/later_turn_tokens"), 5 + 5);
}

#[test]
fn prompts_stay_exact_when_replies_end_early() {
    let finished = run(&[TEMPLATE, FAST, "--early-stop 0.5"], &[WORKLOAD, LOAD]);
    is_exact(&finished);
    let early = finished.truth.turns.iter().filter(|line| line["outcome"] == "early").count();
    assert!(early > finished.truth.turns.len() / 4, "{early} replies ended early");
}

#[test]
fn prompts_stay_exact_when_replies_tokenise_to_another_length() {
    let finished = run(&[TEMPLATE, FAST, "--reply random"], &[WORKLOAD, LOAD]);
    is_exact(&finished);
    let rows = finished.saved.rows();
    let others = rows.iter().filter(|row| row["reply_tokens"] != row["output_tokens"]).count();
    assert!(others > rows.len() / 2, "{others} replies had another length as history");
}

#[test]
fn prompts_are_exact_by_the_servers_own_tokenizer() {
    let finished = run(&[TEMPLATE, FAST], &[WORKLOAD, LOAD, "--tokenizer server"]);
    is_exact(&finished);
    assert_eq!(finished.saved.at("/config/tokenizer"), "server");
}

#[test]
fn a_server_without_usage_gets_a_report_that_says_what_was_not_counted() {
    let finished = run(&[TEMPLATE, FAST, "--no-usage"], &[WORKLOAD, LOAD]);
    let saved = &finished.saved;
    assert!(saved.at("/preparation/template").is_null());
    assert!(finished.ran.stdout.contains("the chat template"), "{}", finished.ran.stdout);
    for (key, line) in finished.truth.by_turn() {
        // The texts have the planned length, and the template comes on top.
        assert_eq!(line["content_tokens"], *saved.planned_total(key.1), "{line}");
    }
    for row in saved.rows() {
        assert_eq!(row["cached_tokens"], serde_json::Value::Null);
        assert_eq!(
            (&row["input_tokens_source"], &row["output_tokens_source"]),
            (&"tokenizer".into(), &"tokenizer".into())
        );
        assert_eq!(row["output_tokens"], 64);
    }
    assert!(saved.at("/hit_rate/reported").is_null());
    assert!(saved.at("/hit_rate/reported_missing").is_string());
}
