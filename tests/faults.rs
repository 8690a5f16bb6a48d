//! What a fault of the server becomes. The simulator lets a share of the requests go wrong in one way, and logs which;
//! each of them must have the outcome that the fault stands for, each other must have succeeded, and every count in the
//! report must be the log's.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;

use serde_json::Value;

use support::{FAST, Finished, Key, Sim, benchctl, key, number, run, turn_of_truth};

/// Two turns, so that a failed first turn has a second one that must not be sent.
const LOAD: &str = "--isl 60 --osl 8 --num-turns 2 --seed 7";
/// Enough in flight that all hanging requests hang at the same time.
const CLOSED: &str = "--concurrency 16 --num-sessions 40";
/// Far beyond what an answer takes, even on a busy machine.
const TIMEOUT: &str = "--request-timeout 3";

/// A fault and what it must become.
struct Case {
    fault: &'static str,
    outcome: &'static str,
    status: Option<u64>,
}

fn becomes(fault: &'static str, outcome: &'static str) -> Case {
    Case { fault, outcome, status: None }
}

fn is_status(fault: &'static str, status: u64) -> Case {
    Case { fault, outcome: "http_status", status: Some(status) }
}

/// A request as both sides saw it.
struct Pair<'a> {
    row: &'a Value,
    /// The request, and before it the same one on a connection that was lost before an answer
    truth: Vec<&'a Value>,
}

impl Pair<'_> {
    fn truth(&self) -> &Value {
        self.truth[self.truth.len() - 1]
    }

    fn fault(&self) -> Option<&str> {
        self.truth()["fault"].as_str()
    }

    /// When its last content event arrived, in ns of the simulator's clock.
    fn last_token_ns(&self, finished: &Finished) -> f64 {
        let origin_ns = finished.saved.number("/environment/origin_monotonic_ns");
        origin_ns + 1e6 * (self.row["sent_ms"].as_f64().unwrap() + self.row["latency_ms"].as_f64().unwrap())
    }
}

fn pairs(finished: &Finished) -> Vec<Pair<'_>> {
    let mut by_turn: BTreeMap<Key, Vec<&Value>> = BTreeMap::new();
    for line in &finished.truth.turns {
        by_turn.entry((number(&line["session"]), turn_of_truth(line))).or_default().push(line);
    }
    let pairs: Vec<Pair> = finished
        .saved
        .rows()
        .iter()
        .map(|row| Pair {
            row,
            truth: by_turn.remove(&key(row)).unwrap_or_else(|| panic!("never came: {row}")),
        })
        .collect();
    assert!(by_turn.is_empty(), "not in the report: {:?}", by_turn.keys());
    pairs
}

/// Runs with these faults, at equal shares of half of all requests, and compares every count with the log.
fn strike_with(cases: &[Case], sim: &[&str], load: &str) -> Finished {
    let share = 0.5 / cases.len() as f64;
    let faults: Vec<String> = cases.iter().map(|case| format!("--fault {}={share}", case.fault)).collect();
    let mut options = vec![FAST];
    options.extend(faults.iter().map(String::as_str));
    options.extend_from_slice(sim);
    let finished = run(&options, &[LOAD, TIMEOUT, load]);
    check(cases, &finished);
    finished
}

fn strike(cases: &[Case]) -> Finished {
    strike_with(cases, &[], CLOSED)
}

fn check(cases: &[Case], finished: &Finished) {
    let saved = &finished.saved;
    let mut struck: BTreeMap<&str, u64> = BTreeMap::new();
    let mut failed: BTreeMap<(&str, Option<u64>), u64> = BTreeMap::new();
    let mut tokens = (0, 0);
    let pairs = pairs(finished);
    for pair in &pairs {
        let (row, truth) = (pair.row, pair.truth());
        let case = pair.fault().map(|name| cases.iter().find(|case| case.fault == name).unwrap());
        let (outcome, status) = case.map_or(("ok", None), |case| (case.outcome, case.status));
        assert_eq!(
            (row["outcome"].as_str().unwrap(), row["http_status"].as_u64()),
            (outcome, status),
            "{row} {truth}"
        );
        assert_eq!(pair.truth.len(), 1 + usize::from(row["resent"] == true), "{row}");
        if let Some(name) = pair.fault() {
            *struck.entry(name).or_default() += 1;
        }
        if outcome == "ok" {
            assert_eq!(truth["outcome"], "ok", "{truth}");
            assert_eq!(row["events"], truth["events"], "{row}");
            assert_eq!(row["output_tokens"], truth["completion_tokens"], "{row}");
            tokens.0 += row["output_tokens"].as_u64().unwrap();
            tokens.1 += truth["completion_tokens"].as_u64().unwrap();
        } else {
            assert!(!row["error"].as_str().unwrap().is_empty(), "a failure says what happened: {row}");
            *failed.entry((outcome, status)).or_default() += 1;
        }
        let (session, turn) = key(row);
        let next = pairs.iter().any(|other| key(other.row) == (session, turn + 1));
        assert!(outcome == "ok" || !next, "a session whose turn failed ends: {row}");
    }
    for case in cases {
        assert!(struck.get(case.fault).is_some_and(|n| *n >= 3), "{} struck {struck:?}", case.fault);
    }
    assert!(struck.values().sum::<u64>() + 10 < pairs.len() as u64, "others were spared: {struck:?}");
    assert_eq!(tokens.0, tokens.1);

    let total: u64 = failed.values().sum();
    assert_eq!(saved.count("/benchmark/total_requests"), pairs.len() as u64);
    assert_eq!(saved.count("/benchmark/failed_requests"), total);
    assert_eq!(saved.count("/failures/total"), total);
    let kinds = saved.at("/failures/kinds").as_array().unwrap();
    let reported: BTreeMap<(&str, Option<u64>), u64> = kinds
        .iter()
        .map(|kind| {
            assert!(!kind["samples"].as_array().unwrap().is_empty(), "{kind}");
            (
                (kind["outcome"].as_str().unwrap(), kind["http_status"].as_u64()),
                kind["count"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(reported, failed);
    assert_eq!(total > 0, saved.reasons().contains(&"errors"), "{:?}", saved.reasons());
}

/// The samples of a kind of failure.
fn samples(finished: &Finished, outcome: &str) -> String {
    let kinds = finished.saved.at("/failures/kinds").as_array().unwrap();
    kinds.iter().filter(|kind| kind["outcome"] == outcome).map(|kind| kind["samples"].to_string()).collect()
}

#[test]
fn a_reset_before_the_head_is_a_reset_and_goes_out_once_more_only_on_a_kept_connection() {
    let finished = strike(&[becomes("reset", "reset")]);
    let mut resent = 0;
    for pair in pairs(&finished).iter().filter(|pair| pair.fault().is_some()) {
        if pair.truth[0]["conn_request"].as_u64().unwrap() > 1 {
            assert_eq!(pair.row["resent"], true, "{}", pair.row);
        }
        if pair.row["resent"] == true {
            resent += 1;
            assert_eq!(
                (&pair.row["new_connection"], &pair.truth()["conn_request"]),
                (&true.into(), &1.into())
            );
        }
    }
    assert!(resent > 0, "connections are kept");
    assert!(samples(&finished, "reset").contains("reset by peer"));
}

#[test]
fn a_connection_closed_before_the_head_is_a_reset() {
    strike(&[becomes("close", "reset")]);
}

#[test]
fn a_connection_that_ends_inside_the_head_is_a_reset() {
    strike(&[becomes("reset:in-head", "reset"), becomes("close:in-head", "reset")]);
}

#[test]
fn a_reset_after_the_head_is_a_reset_and_never_goes_out_again() {
    let finished = strike(&[becomes("reset:after-head", "reset"), becomes("reset:5", "reset")]);
    assert!(finished.saved.rows().iter().all(|row| row["resent"] == false));
    for pair in pairs(&finished).iter().filter(|pair| pair.fault() == Some("reset:5")) {
        assert_eq!(pair.row["events"], 5, "what had come is kept: {}", pair.row);
        assert!(pair.row["ttft_ms"].is_number());
    }
}

#[test]
fn a_body_that_is_cut_off_is_truncated() {
    let finished = strike(&[
        becomes("close:after-head", "truncated"),
        becomes("close:5", "truncated"),
        becomes("half-close:5", "truncated"),
    ]);
    assert!(finished.saved.rows().iter().all(|row| row["resent"] == false));
}

#[test]
fn a_body_that_ends_in_order_without_finish_reason_and_done_is_truncated() {
    let finished = strike(&[becomes("end:0", "truncated"), becomes("end:5", "truncated")]);
    assert!(samples(&finished, "truncated").contains("neither finish reason nor [DONE]"));
}

#[test]
fn a_server_that_hangs_is_a_timeout_wherever_it_does() {
    let finished = strike(&[
        becomes("hang", "timeout"),
        becomes("hang:in-head", "timeout"),
        becomes("hang:5", "timeout"),
    ]);
    assert!(samples(&finished, "timeout").contains("no end within 3 s"));
    for pair in pairs(&finished).iter().filter(|pair| pair.fault().is_some()) {
        let took_ms = pair.row["completed_ms"].as_f64().unwrap() - pair.row["sent_ms"].as_f64().unwrap();
        assert!(took_ms >= 3000.0, "{took_ms}");
    }
}

#[test]
fn an_error_status_is_counted_by_its_code_whatever_its_body() {
    let finished = strike_with(
        &[
            is_status("status:400", 400),
            is_status("status:401:html", 401),
            is_status("status:404:empty", 404),
            is_status("status:429", 429),
            is_status("status:500:html", 500),
            is_status("status:503:empty", 503),
        ],
        &[],
        "--concurrency 16 --num-sessions 120",
    );
    let samples = samples(&finished, "http_status");
    assert!(samples.contains("a fault was asked for"), "the message of a JSON error: {samples}");
    assert!(samples.contains("status 503 without a body"), "{samples}");
}

#[test]
fn an_error_object_inside_a_stream_is_a_stream_error_before_and_after_tokens() {
    let finished = strike(&[becomes("error:0", "stream_error"), becomes("error:4", "stream_error")]);
    assert_eq!(samples(&finished, "stream_error"), r#"["a fault was asked for"]"#);
    for pair in pairs(&finished).iter().filter(|pair| pair.fault() == Some("error:4")) {
        assert_eq!(pair.row["events"], 4, "{}", pair.row);
    }
}

#[test]
fn a_json_body_instead_of_a_stream_is_one_content_event() {
    let finished = strike(&[becomes("json", "ok")]);
    for pair in pairs(&finished).iter().filter(|pair| pair.fault().is_some()) {
        assert_eq!((&pair.row["events"], &pair.row["output_tokens"]), (&1.into(), &8.into()));
        assert_eq!(pair.row["ttft_ms"], pair.row["latency_ms"], "all of it came at once");
    }
}

#[test]
fn a_json_body_with_a_wrong_length_is_truncated_or_unreadable() {
    strike(&[becomes("json:40", "truncated"), becomes("json:-40", "decode")]);
}

#[test]
fn a_stream_with_a_wrong_length_counts_as_far_as_it_goes() {
    // Cut before its finish reason, whole and followed by nothing, and right.
    strike(&[becomes("length:-900", "truncated"), becomes("length:40", "ok"), becomes("length", "ok")]);
}

#[test]
fn what_is_not_json_is_undecodable() {
    let finished = strike(&[becomes("garbage", "decode"), becomes("garbage:3", "decode")]);
    assert!(samples(&finished, "decode").contains("oops"), "the sample shows what came");
}

#[test]
fn a_broken_chunk_and_a_flood_of_headers_are_undecodable() {
    let finished = strike(&[becomes("bad-chunk:3", "decode"), becomes("header-flood:2000", "decode")]);
    assert!(finished.saved.rows().iter().all(|row| row["resent"] == false));
}

#[test]
fn an_answer_without_tokens_is_empty() {
    strike(&[becomes("empty", "empty")]);
}

#[test]
fn a_finish_reason_or_done_alone_ends_an_answer() {
    strike(&[becomes("no-done", "ok"), becomes("no-finish", "ok")]);
}

#[test]
fn a_late_done_is_not_part_of_the_latency() {
    let finished = strike(&[becomes("late-done:2000", "ok")]);
    for pair in pairs(&finished).iter().filter(|pair| pair.fault().is_some()) {
        let done_ns = pair.truth()["end_ns"].as_f64().unwrap();
        assert!(pair.last_token_ns(&finished) < done_ns, "{}", pair.row);
    }
}

#[test]
fn usage_in_every_chunk_is_counted_once() {
    strike_with(&[becomes("usage-each", "ok")], &["--tokens-per-event 3"], CLOSED);
}

#[test]
fn reasoning_is_output_but_no_history() {
    let finished = strike(&[becomes("reasoning:3", "ok")]);
    for pair in &pairs(&finished) {
        let reply = if pair.fault().is_some() { 5 } else { 8 };
        assert_eq!(pair.row["reply_tokens"], reply, "{}", pair.row);
    }
}

#[test]
fn tool_calls_are_output_but_no_history() {
    let finished = strike(&[becomes("tools", "ok")]);
    for pair in &pairs(&finished) {
        assert_eq!(pair.row["reply_tokens"], if pair.fault().is_some() { 0 } else { 8 }, "{}", pair.row);
    }
}

#[test]
fn events_cut_anywhere_are_the_same_events() {
    // Random ids: their text has characters of several bytes.
    strike_with(&[becomes("cut", "ok"), becomes("drip", "ok")], &["--reply random"], CLOSED);
}

#[test]
fn every_form_of_an_event_stream_is_read() {
    strike(&[becomes("crlf", "ok"), becomes("cr", "ok"), becomes("fields", "ok")]);
}

#[test]
fn a_stream_that_is_compressed_without_being_asked_for_is_read() {
    strike(&[becomes("gzip", "ok")]);
}

#[test]
fn an_answer_in_one_burst_keeps_its_events_and_tokens() {
    let finished = strike(&[becomes("burst", "ok")]);
    for pair in pairs(&finished).iter().filter(|pair| pair.fault().is_some()) {
        assert_eq!((&pair.row["events"], &pair.row["output_tokens"]), (&8.into(), &8.into()));
    }
}

#[test]
fn an_event_of_ten_megabytes_is_read() {
    strike_with(&[becomes("huge:10", "ok")], &[], "--concurrency 4 --num-sessions 12");
}

#[test]
fn what_falls_into_a_stall_of_the_server_succeeds_late() {
    let stalls = "--stall-ms 300 --stall-every-s 0.6";
    let finished = run(&[FAST, stalls], &["--isl 60 --osl 8 --request-rate 50 --duration 2"]);
    check(&[], &finished);
    let waited = |pair: &&Pair| {
        let at = |name: &str| pair.truth()[name].as_f64().unwrap();
        at("due_first_ns") - at("start_ns") > 100e6
    };
    let pairs = pairs(&finished);
    let late: Vec<&Pair> = pairs.iter().filter(waited).collect();
    assert!(late.len() >= 10, "{} of {} waited", late.len(), pairs.len());
    assert!(late.iter().all(|pair| pair.row["ttft_ms"].as_f64().unwrap() > 100.0));
}

#[test]
fn a_slow_accept_is_part_of_the_time_to_first_token_of_new_connections() {
    let finished = run(&[FAST, "--accept-delay-ms 30"], &[LOAD, "--concurrency 8 --num-sessions 20"]);
    check(&[], &finished);
    let ttfts_ms = |is_new: bool| {
        let rows = finished.saved.rows().iter().filter(move |row| row["new_connection"] == is_new);
        rows.map(|row| row["ttft_ms"].as_f64().unwrap()).collect::<Vec<f64>>()
    };
    // Eight connections are asked for at once, and accepted one after another.
    let slowest = ttfts_ms(true).into_iter().fold(0.0, f64::max);
    assert!(slowest >= 100.0, "{slowest}");
    assert!(!ttfts_ms(false).is_empty(), "connections are kept");
}

#[test]
fn a_server_that_fails_already_before_the_load_is_refused_in_a_sentence_that_says_how() {
    for (fault, said) in [
        ("reset:2", "broke the connection: "),
        ("hang", "(timeout): no end within 1 s"),
        ("garbage", "(decode): "),
        ("end:2", "(truncated): "),
        ("error:1", "(stream_error): a fault was asked for"),
        ("status:500:html", "status 500: "),
    ] {
        let sim = Sim::start(&[FAST, "--fault-all", &format!("--fault {fault}=1")]);
        let load =
            "--isl 60 --osl 8 --concurrency 2 --num-sessions 2 --tokenizer builtin --request-timeout 1";
        let ran = benchctl(&["run -u", &sim.url, load]);
        assert_eq!(ran.stdout, "", "{fault}");
        let sentence = ran.stderr.lines().last().unwrap();
        assert!(sentence.starts_with("benchctl: ") && sentence.contains(said), "{fault}: {ran:?}");
        assert!([5, 6].contains(&ran.code.unwrap()), "{fault}: {ran:?}");
        assert_eq!(sim.end().turns.len(), 0, "no load was sent");
    }
}

#[test]
fn a_server_whose_answers_are_all_empty_is_still_measured() {
    let sim = Sim::start(&[FAST, "--fault-all --fault empty=1"]);
    let load = "--isl 60 --osl 8 --concurrency 2 --num-sessions 2 --tokenizer builtin -q";
    let ran = benchctl(&["run -u", &sim.url, load]);
    assert_eq!(ran.code, Some(5), "{ran:?}");
    assert!(
        ran.stderr.contains("most often with empty: the answer has neither content nor output tokens"),
        "{ran:?}"
    );
    assert!(sim.end().turns.len() >= 2);
}
