//! Golden lines: a line of each message as it stands on the wire. Lines are only ever added; a change that makes one
//! fail breaks somebody's client.

use std::collections::BTreeSet;

use proto::wire::{EndLine, ErrorCode, Event, Hello, Reply, Request, Status, Stopping};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads each line as `T` and writes it again: nothing that a line says may be lost or changed.
fn lines_survive<T: Serialize + DeserializeOwned>(lines: &str) {
    for line in lines.lines().filter(|l| !l.is_empty()) {
        let value: T = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let again = serde_json::to_value(&value).expect("a message has a JSON form");
        let before: Value = serde_json::from_str(line).expect("it was read before");
        assert_contains(&again, &before, line);
    }
}

/// `whole` says everything that `part` says. Fields that were left to their defaults may appear.
fn assert_contains(whole: &Value, part: &Value, line: &str) {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            for (name, value) in part {
                assert_contains(
                    whole.get(name).unwrap_or_else(|| panic!("{name} was lost: {line}")),
                    value,
                    line,
                );
            }
        }
        _ => assert_eq!(whole, part, "{line}"),
    }
}

#[test]
fn requests() {
    lines_survive::<Request>(include_str!("golden/requests.jsonl"));
}

#[test]
fn every_command_has_a_golden_line() {
    let tags: BTreeSet<String> = include_str!("golden/requests.jsonl")
        .lines()
        .map(|l| serde_json::from_str::<Value>(l).unwrap()["cmd"].as_str().unwrap().to_owned())
        .collect();
    let want = ["hello", "plan", "quit", "run", "smoke", "status", "stop", "watch"];
    assert_eq!(tags.iter().map(String::as_str).collect::<Vec<_>>(), want);
}

#[test]
fn events() {
    lines_survive::<Event>(include_str!("golden/events.jsonl"));
}

#[test]
fn replies() {
    for line in include_str!("golden/replies.jsonl").lines() {
        let reply: Reply = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert_eq!(serde_json::to_string(&reply).unwrap(), line);
    }
}

#[test]
fn values() {
    lines_survive::<Hello>(r#"{"version":"0.1.0","protocol":1,"pid":7,"uptime_s":1.5}"#);
    lines_survive::<Stopping>(r#"{"in_flight":3}"#);
    lines_survive::<EndLine>(r#"{"end":{"records":2,"crc32":"0011aabb"}}"#);
    lines_survive::<Status>(
        r#"{"state":"measuring","target":"http://h","model":"m","asked_rate_per_s":10.0,"achieved_rate_per_s":9.9,"elapsed_s":3.0,"planned":100,"sent":30,"in_flight":2,"completed":28,"failed":1,"refused":0,"measured":20,"sessions_ended":4,"dispatch_lag_p99_ms":0.2,"eta_s":7.0,"verdict":null}"#,
    );
}

#[test]
fn error_codes() {
    for code in [
        "bad_request",
        "bad_value",
        "infeasible",
        "busy",
        "not_running",
        "unreachable",
        "unauthorized",
        "unknown_model",
        "server",
        "tokenizer",
        "stopped",
        "internal",
    ] {
        serde_json::from_value::<ErrorCode>(code.into()).unwrap();
    }
}

#[test]
fn what_is_not_a_request_is_refused() {
    for line in [
        r#"{"cmd":"fly"}"#,
        r#"{"cmd":"status","verbose":true}"#,
        r#"{"cmd":"stop","now":1}"#,
        r#"{"status":{}}"#,
        r#"[]"#,
        r#"{"cmd":"plan","workload":{"isl":1,"osl":1,"num_turns":1,"hit-rate":0.5}}"#,
    ] {
        assert!(serde_json::from_str::<Request>(line).is_err(), "{line}");
    }
}

#[test]
fn a_newer_daemons_extra_fields_are_tolerated() {
    let hello: Hello =
        serde_json::from_str(r#"{"version":"9","protocol":9,"pid":1,"uptime_s":0.0,"mood":"good"}"#).unwrap();
    assert_eq!(hello.protocol, 9);
}
