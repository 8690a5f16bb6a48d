//! What benchsim answers: shapes, exact counts, prefix cache, determinism, and the truth log beside them.

mod support;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::{Sim, TEMPLATE, chat, user};

#[test]
fn a_stream_has_role_contents_finish_usage_and_done() {
    let sim = Sim::start(&TEMPLATE);
    let body = chat(&[user("hello there")], json!({"max_tokens": 12, "ignore_eos": true}));
    let answer = sim.connect().post("/v1/chat/completions", &body);
    assert!(answer.head.contains("content-type: text/event-stream"), "{}", answer.head);
    let stream = answer.stream();
    assert_eq!(stream.events.len(), 1 + 12 + 1 + 1);
    assert_eq!(stream.events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(stream.contents.len(), 12);
    assert_eq!(stream.events[13]["choices"][0]["finish_reason"], "length");
    assert_eq!(stream.events[14]["choices"], json!([]));
    let prompt = stream.usage["prompt_tokens"].as_u64().unwrap();
    assert_eq!(stream.usage["completion_tokens"], 12);
    assert_eq!(stream.usage["total_tokens"], prompt + 12);
    assert_eq!(stream.usage["prompt_tokens_details"]["cached_tokens"], 0);
    sim.end();
}

#[test]
fn the_truth_log_tells_the_same_as_the_answers() {
    let sim = Sim::start(&[&TEMPLATE[..], &["--truth-writes"]].concat());
    let mut client = sim.connect();
    let body = chat(&[user("hi")], json!({"max_tokens": 9})).to_string();
    let first = client.post_with("/v1/chat/completions", "X-Session-Id: s-7\r\n", &body).stream();
    let whole = json!({"messages": [user("hi")], "max_tokens": 3});
    assert_eq!(client.post("/v1/chat/completions", &whole).json()["usage"]["completion_tokens"], 3);
    assert_eq!(client.post("/v1/chat/completions", &json!({"model": "other"})).status, 400);
    assert_eq!(client.get("/health").status, 200);

    let truth = sim.end();
    assert_eq!(truth.header["options"]["template"], json!({"request": 7, "message": 5, "reply": 5}));
    assert_eq!(truth.requests.len(), 4);
    assert_eq!(truth.end["requests"], 4);
    assert_eq!(truth.end["events"], 9 + 1);
    assert_eq!(truth.end["peak_concurrent"], 1);
    let line = &truth.replies[0];
    let fields = ["session", "conn", "conn_request", "messages", "model", "max_tokens", "status", "outcome"];
    let told: Vec<&Value> = fields.iter().map(|field| &line[field]).collect();
    assert_eq!(
        told,
        [&json!("s-7"), &json!(0), &json!(1), &json!(1), &json!("sim"), &json!(9), &json!(200), &json!("ok")]
    );
    assert_eq!(line["prompt_tokens"], first.usage["prompt_tokens"]);
    assert_eq!(line["prompt_tokens"].as_u64().unwrap(), 7 + 5 + 5 + line["content_tokens"].as_u64().unwrap());
    assert_eq!((&line["completion_tokens"], &line["events"]), (&json!(9), &json!(9)));
    assert_eq!(line["digest"], digest(&[("user", "hi")]));
    // Everything happened in this order.
    let instants: Vec<u64> = [
        "accepted_ns",
        "first_byte_ns",
        "read_ns",
        "start_ns",
        "due_first_ns",
        "first_write_ns",
        "last_write_ns",
        "end_ns",
    ]
    .iter()
    .map(|field| line[field].as_u64().unwrap())
    .collect();
    assert!(instants.is_sorted(), "{line}");
    let writes: Vec<u64> =
        line["writes_ns"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
    assert_eq!((writes.len(), writes[0], writes[8]), (9, instants[5], instants[6]));
    assert!(writes.is_sorted());
    assert_eq!(truth.replies[1]["stream"], false);
    assert_eq!(truth.replies[2]["outcome"], "rejected");
    assert_eq!(truth.replies[2]["conn_request"], 3);
}

/// The definition, written a second time.
fn digest(messages: &[(&str, &str)]) -> String {
    let mut hash = Sha256::new();
    for text in messages.iter().flat_map(|(role, content)| [role, content]) {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn the_next_turn_finds_prompt_and_reply_in_the_cache_by_whole_blocks() {
    let sim = Sim::start(&TEMPLATE);
    let mut client = sim.connect();
    let mut history = vec![json!({"role": "system", "content": "the same words again and again ".repeat(8)})];
    let (mut before, mut queried, mut hit) = (0, 0, 0);
    for turn in 0..4 {
        let stream = client.turn(&mut history, &format!("question {turn}"), 30);
        let prompt = stream.usage["prompt_tokens"].as_u64().unwrap();
        // The last generated token is never computed, and the last prompt token always is.
        let cached = if turn == 0 { 0 } else { (before - 1) / 16 * 16 };
        assert_eq!(stream.usage["prompt_tokens_details"]["cached_tokens"], cached, "turn {turn}");
        before = prompt + 30;
        queried += prompt;
        hit += cached;
    }
    assert_eq!(sim.metric("vllm:prefix_cache_queries_total"), queried as f64);
    assert_eq!(sim.metric("vllm:prefix_cache_hits_total"), hit as f64);
    assert_eq!(sim.metric("vllm:prompt_tokens_total"), queried as f64);
    assert_eq!(sim.metric("vllm:generation_tokens_total"), 120.0);
    assert_eq!(sim.metric("vllm:time_to_first_token_seconds_count"), 4.0);
    sim.end();
}

#[test]
fn a_prompt_that_is_cached_whole_computes_its_last_token() {
    let sim = Sim::start(&[
        "--template-request",
        "0",
        "--template-message",
        "0",
        "--template-reply",
        "0",
        "--block-size",
        "1",
    ]);
    let mut client = sim.connect();
    let ask = json!({"prompt": [5, 6, 7, 8], "max_tokens": 1});
    client.post("/v1/completions", &ask);
    let usage = &client.post("/v1/completions", &ask).json()["usage"];
    assert_eq!(
        (&usage["prompt_tokens"], &usage["prompt_tokens_details"]["cached_tokens"]),
        (&json!(4), &json!(3))
    );
    sim.end();
}

#[test]
fn tokenize_counts_what_usage_counts() {
    let sim = Sim::start(&TEMPLATE);
    let mut client = sim.connect();
    let messages = [json!({"role": "system", "content": "be brief"}), user("how are you?")];
    let stream = client.post("/v1/chat/completions", &chat(&messages, json!({"max_tokens": 20}))).stream();
    let tokenized = client.post("/tokenize", &json!({"model": "sim", "messages": messages})).json();
    assert_eq!(tokenized["count"], stream.usage["prompt_tokens"]);
    assert_eq!(tokenized["tokens"].as_array().unwrap().len() as u64, tokenized["count"]);
    // The reply's words tokenise back to as many tokens as were generated, in both styles.
    let vllm = client.post("/tokenize", &json!({"prompt": stream.text, "add_special_tokens": false})).json();
    assert_eq!(vllm["count"], 20);
    let llama = client.post("/tokenize", &json!({"content": stream.text})).json();
    assert_eq!(llama["tokens"], vllm["tokens"]);
    sim.end();
}

#[test]
fn the_same_seed_and_messages_give_the_same_reply_in_any_order() {
    let texts = |args: &[&str], order: [usize; 3]| {
        let sim = Sim::start(args);
        let mut client = sim.connect();
        let mut texts = vec![String::new(); 3];
        for n in order {
            texts[n] = client.turn(&mut vec![], ["a", "b", "c"][n], 10).text;
        }
        let truth = sim.end();
        let mut digests: Vec<String> = truth.replies.iter().map(|line| line["digest"].to_string()).collect();
        digests.sort();
        (texts, digests)
    };
    let first = texts(&["--seed", "5"], [0, 1, 2]);
    assert_eq!(texts(&["--seed", "5"], [2, 0, 1]), first);
    let other = texts(&["--seed", "6"], [0, 1, 2]);
    assert_ne!(other.0, first.0);
    assert_eq!(other.1, first.1, "the digest knows nothing of the seed");
}

#[test]
fn early_stops_are_told_as_stop_and_early() {
    let sim = Sim::start(&["--early-stop", "1"]);
    let stream = sim.connect().turn(&mut vec![], "hi", 50);
    assert_eq!(stream.finish, "stop");
    assert!((1..50).contains(&stream.usage["completion_tokens"].as_u64().unwrap()));
    assert_eq!(sim.end().replies[0]["outcome"], "early");
}

#[test]
fn random_replies_count_generated_tokens_not_events() {
    let sim = Sim::start(&["--reply", "random"]);
    let mut client = sim.connect();
    let stream = client.turn(&mut vec![], "hi", 300);
    assert_eq!(stream.usage["completion_tokens"], 300);
    assert!(stream.contents.len() <= 300);
    let again = client.post("/tokenize", &json!({"content": stream.text})).json();
    assert_ne!(again["tokens"].as_array().unwrap().len(), 300);
    let truth = sim.end();
    assert_eq!(truth.replies[0]["events"], stream.contents.len() as u64);
}

#[test]
fn usage_can_be_in_every_chunk_or_in_none() {
    let sim = Sim::start(&["--tokens-per-event", "4"]);
    let options =
        json!({"max_tokens": 10, "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let stream = sim.connect().post("/v1/chat/completions", &chat(&[user("x")], options)).stream();
    let counts: Vec<_> =
        stream.events.iter().map(|event| event["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert_eq!(counts, [0, 4, 8, 10, 10, 10]);
    sim.end();

    let sim = Sim::start(&["--no-usage"]);
    let stream = sim.connect().turn(&mut vec![], "x", 3);
    assert!(stream.events.iter().all(|event| event.get("usage").is_none()));
    sim.end();

    let sim = Sim::start(&["--no-cached-tokens"]);
    assert!(sim.connect().turn(&mut vec![], "x", 3).usage.get("prompt_tokens_details").is_none());
    sim.end();
}

#[test]
fn a_completion_is_answered_as_text() {
    let sim = Sim::start(&[]);
    let mut client = sim.connect();
    let whole =
        client.post("/v1/completions", &json!({"model": "sim", "prompt": "once", "max_tokens": 4})).json();
    let body = json!({"prompt": "once", "max_tokens": 4, "stream": true});
    let stream = client.post("/v1/completions", &body).stream();
    assert_eq!(whole["choices"][0]["text"], stream.text);
    assert_eq!(stream.events.len(), 4 + 1);
    assert_eq!(stream.usage, Value::Null, "usage was not asked for");
    assert_eq!(client.get("/v1/models").json()["data"][0]["id"], "sim");
    sim.end();
}
