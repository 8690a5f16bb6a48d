//! How benchsim behaves as a server: refusals, connections that break, slots, slow readers, its own end.

mod support;

use std::io::Write;

use serde_json::json;
use support::{Sim, chat, user};

/// Longer than any test runs.
const NEVER_MS: &str = "100000000";

#[test]
fn refusals_are_error_objects_and_keep_the_connection() {
    let sim = Sim::start(&["--api-key", "k", "--max-model-len", "100", "--reject", "ignore_eos"]);
    let mut client = sim.connect();
    let mut refused = |headers: &str, body: &str| {
        let answer = client.post_with("/v1/chat/completions", headers, body);
        let error = answer.json()["error"].clone();
        assert_eq!(error["code"], answer.status);
        assert!(!error["message"].as_str().unwrap().is_empty() && error["type"].is_string());
        (answer.status, error["param"].clone())
    };
    let key = "Authorization: Bearer k\r\n";
    let ok = chat(&[user("hi")], json!({"max_tokens": 2})).to_string();
    assert_eq!(refused("", &ok).0, 401);
    assert_eq!(refused("Authorization: Bearer x\r\n", &ok).0, 401);
    assert_eq!(refused(key, "{").0, 400);
    assert_eq!(refused(key, &chat(&[user("hi")], json!({"model": "x"})).to_string()).0, 404);
    assert_eq!(refused(key, &chat(&[user("hi")], json!({"max_tokens": 101})).to_string()).0, 400);
    let parameter = chat(&[user("hi")], json!({"ignore_eos": true})).to_string();
    assert_eq!(refused(key, &parameter), (400, json!("ignore_eos")));
    assert_eq!(client.get("/nowhere").status, 404);
    assert_eq!(client.get("/v1/chat/completions").status, 401);
    assert_eq!(client.get("/tokenize").status, 405);
    assert_eq!(client.post_with("/v1/chat/completions", key, &ok).stream().contents.len(), 2);

    let truth = sim.end();
    assert!(truth.requests.iter().all(|line| line["conn"] == 0));
    assert_eq!(truth.requests.iter().filter(|line| line["outcome"] == "rejected").count(), 9);
    assert_eq!(truth.header["args"].to_string().matches("\"k\"").count(), 0, "the key is not logged");
}

#[test]
fn while_it_loads_everything_is_503() {
    let sim = Sim::start(&["--loading-s", "100000"]);
    let mut client = sim.connect();
    assert_eq!(client.get("/health").status, 503);
    assert_eq!(client.post("/v1/chat/completions", &chat(&[user("hi")], json!({}))).status, 503);
    sim.end();
}

#[test]
fn a_body_may_come_chunked_and_in_single_bytes() {
    let sim = Sim::start(&[]);
    let mut client = sim.connect();
    let body = chat(&[user("hi")], json!({"max_tokens": 3})).to_string();
    let (a, b) = body.split_at(10);
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{a}\r\n{:x}\r\n{b}\r\n0\r\n\r\n",
        a.len(),
        b.len()
    );
    client.socket.get_mut().set_nodelay(true).unwrap();
    for byte in request.bytes() {
        client.socket.get_mut().write_all(&[byte]).unwrap();
    }
    assert_eq!(client.answer().stream().contents.len(), 3);
    sim.end();
}

#[test]
fn connection_close_is_honoured_and_nonsense_closes() {
    let sim = Sim::start(&[]);
    let mut client = sim.connect();
    let body = chat(&[user("hi")], json!({"max_tokens": 3})).to_string();
    let answer = client.post_with("/v1/chat/completions", "Connection: close\r\n", &body);
    assert!(answer.head.contains("connection: close"));
    assert_eq!(answer.stream().contents.len(), 3);
    assert!(client.is_closed());
    let mut client = sim.connect();
    client.send(b"\x16\x03\x01\r\n\r\n");
    assert_eq!(client.answer().status, 400);
    assert!(client.is_closed());
    sim.end();
}

#[test]
fn the_head_comes_at_once_and_with_early_role_the_role_too() {
    let sim = Sim::start(&["--ttft-ms", NEVER_MS, "--early-role"]);
    let mut client = sim.connect();
    client.send_post("/v1/chat/completions", "", &chat(&[user("hi")], json!({})).to_string());
    assert!(client.head().starts_with("HTTP/1.1 200"));
    assert!(String::from_utf8(client.chunk()).unwrap().contains("\"role\":\"assistant\""));
    drop(client);
    sim.until("vllm:num_requests_running", |running| running == 0.0);
    let line = &sim.end().replies[0];
    assert_eq!((&line["outcome"], &line["events"]), (&json!("client_gone"), &json!(0)));
    assert!(line["first_write_ns"].is_null());
}

#[test]
fn a_client_that_leaves_within_a_stream_frees_its_slot_for_the_next() {
    let sim = Sim::start(&["--slots", "1", "--itl-ms", NEVER_MS]);
    let mut leaver = sim.connect();
    leaver.send_post("/v1/chat/completions", "", &chat(&[user("hi")], json!({"max_tokens": 5})).to_string());
    leaver.head();
    leaver.chunk();
    assert!(String::from_utf8(leaver.chunk()).unwrap().contains("content"));
    let mut waiter = sim.connect();
    waiter.send_post("/v1/chat/completions", "", &chat(&[user("ho")], json!({"max_tokens": 1})).to_string());
    sim.until("vllm:num_requests_waiting", |waiting| waiting == 1.0);
    drop(leaver);
    assert_eq!(waiter.answer().stream().contents.len(), 1);

    let truth = sim.end();
    let [left, served] = &truth.replies[..] else { panic!() };
    assert_eq!((&left["outcome"], &left["completion_tokens"]), (&json!("client_gone"), &json!(1)));
    assert_eq!(served["outcome"], "ok");
    assert!(served["start_ns"].as_u64() >= left["end_ns"].as_u64());
}

#[test]
fn slots_are_given_in_order() {
    let sim = Sim::start(&["--slots", "2"]);
    let mut clients: Vec<_> = (0..8)
        .map(|n| {
            let mut client = sim.connect();
            client.send_post(
                "/v1/chat/completions",
                "",
                &chat(&[user(&n.to_string())], json!({"max_tokens": 40})).to_string(),
            );
            client
        })
        .collect();
    clients.iter_mut().for_each(|client| assert_eq!(client.answer().stream().contents.len(), 40));
    let truth = sim.end();
    let mut lines = truth.replies.clone();
    lines.sort_by_key(|line| line["seq"].as_u64());
    assert!(lines.is_sorted_by_key(|line| line["start_ns"].as_u64()));
    assert_eq!(truth.end["peak_concurrent"], 2);
}

#[test]
fn a_slow_reader_gets_everything_and_is_told_as_stalled() {
    // More than the socket buffers of both sides hold.
    const TOKENS: usize = 80_000;
    let sim = Sim::start(&["--itl-ms", "0"]);
    let mut client = sim.connect();
    client.send_post(
        "/v1/chat/completions",
        "",
        &chat(&[user("hi")], json!({"max_tokens": TOKENS})).to_string(),
    );
    sim.until("benchsim:stalls_total", |stalls| stalls > 0.0);
    assert_eq!(client.answer().stream().contents.len(), TOKENS);
    let line = &sim.end().replies[0];
    assert_eq!(
        (&line["stalled"], &line["outcome"], &line["events"]),
        (&json!(true), &json!("ok"), &json!(TOKENS))
    );
}

#[test]
fn a_signal_ends_it_and_what_was_in_flight_is_logged() {
    let sim = Sim::start(&["--itl-ms", NEVER_MS]);
    let mut client = sim.connect();
    client.send_post("/v1/chat/completions", "", &chat(&[user("hi")], json!({"max_tokens": 5})).to_string());
    client.head();
    client.chunk();
    client.chunk();
    let pid = rustix::process::Pid::from_raw(i32::try_from(sim.pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let truth = sim.wait();
    assert!(client.is_closed());
    assert_eq!(truth.replies[0]["outcome"], "shutdown");
    assert_eq!(truth.replies[0]["completion_tokens"], 1);
}
