//! The protocol as a stranger speaks it: lines of JSON on the socket of a real benchd, written and read by this test's
//! own client, with the real simulator as the server under test.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::{PATIENCE, Ran, Sim, command, until};

/// The longest line that the daemon reads.
const LONGEST_LINE: usize = 1 << 20;
/// A server whose replies take a second.
const SLOW: &str = "--ttft-ms 20 --itl-ms 20 --prefill-us-per-token 0";

/// A benchd of our own, and the folder of its socket.
struct Daemon {
    child: Child,
    lifeline: Option<ChildStdin>,
    socket: PathBuf,
    folder: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Daemon {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("benchd.sock");
        let child = command("benchd")
            .args(["--socket", socket.to_str().unwrap()])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let daemon = Daemon { child, lifeline: None, socket, folder };
        until("benchd listens", || UnixStream::connect(&daemon.socket).is_ok());
        daemon
    }

    /// One that belongs to us: it reads `secrets`, and lives as long as our end of its standard input.
    fn private(secrets: &Value) -> Daemon {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("benchctl-1");
        std::fs::create_dir(&inner).unwrap();
        let socket = inner.join("benchd.sock");
        let mut child = command("benchd")
            .args(["--private", "--socket", socket.to_str().unwrap()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lifeline = child.stdin.take().unwrap();
        writeln!(lifeline, "{secrets}").unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "{\"ready\":true}\n");
        Daemon { child, lifeline: Some(lifeline), socket, folder }
    }

    fn connect(&self) -> Client {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client(BufReader::new(stream))
    }

    fn state(&self) -> String {
        self.connect().ok(&json!({"cmd": "status"}))["state"].as_str().unwrap().to_owned()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap(), signal).unwrap();
    }

    /// Waits until it has ended; its exit code.
    fn wait(&mut self) -> Option<i32> {
        let mut status = None;
        until("benchd ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Only when a test has not ended it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Client(BufReader<UnixStream>);

impl Client {
    fn write(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    fn send(&mut self, request: &Value) {
        self.write(format!("{request}\n").as_bytes());
    }

    /// The next line with its newline; empty at the end.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line
    }

    fn value(&mut self) -> Value {
        let line = self.line();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"))
    }

    /// Sends a request that must be done; its value.
    #[track_caller]
    fn ok(&mut self, request: &Value) -> Value {
        self.send(request);
        self.expect_ok()
    }

    #[track_caller]
    fn expect_ok(&mut self) -> Value {
        let mut reply = self.value();
        assert!(reply.get("ok").is_some(), "{reply}");
        reply["ok"].take()
    }

    /// The next reply, which must be an error of this code; its sentence.
    #[track_caller]
    fn expect_err(&mut self, code: &str) -> String {
        let reply = self.value();
        assert_eq!(reply["err"]["code"], code, "{reply}");
        reply["err"]["message"].as_str().unwrap().to_owned()
    }

    /// Whether the daemon has closed the connection.
    fn is_closed(&mut self) -> bool {
        match self.0.read(&mut [0]) {
            Ok(bytes) => bytes == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// The rest of a run's answer: report, rows, and an end line that counts and sums them up.
    #[track_caller]
    fn expect_report(&mut self) -> (Value, Vec<Value>) {
        let report = self.expect_ok();
        let (mut rows, mut bytes) = (Vec::new(), Vec::new());
        loop {
            let line = self.line();
            let value: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
            if let Some(end) = value.get("end") {
                assert_eq!(end["records"], rows.len());
                assert_eq!(end["crc32"], format!("{:08x}", crc32(&bytes)));
                assert_eq!(report["benchmark"]["total_requests"], rows.len());
                return (report, rows);
            }
            bytes.extend_from_slice(line.as_bytes());
            rows.push(value);
        }
    }
}

/// CRC-32 (IEEE), bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

fn run_request(url: &str, load: &Value) -> Value {
    json!({"cmd": "run", "command_line": ["a", "stranger"], "plan": {
        "target": {"url": url, "tokenizer": "builtin"},
        "workload": {"isl": 200, "osl": 40, "num_turns": 2},
        "load": load,
    }})
}

fn closed(num_sessions: u32) -> Value {
    json!({"mode": "closed", "concurrency": 4, "num_sessions": num_sessions})
}

/// A run that would take long, with some requests answered.
fn long_run(daemon: &Daemon, sim: &Sim) -> Client {
    let mut runner = daemon.connect();
    runner.send(&run_request(&sim.url, &closed(10_000)));
    sim.until_ended_and_running(4, 4);
    runner
}

/// What a stopped run answers agrees with what the simulator saw.
#[track_caller]
fn is_partial(runner: &mut Client, sim: Sim) {
    let (report, rows) = runner.expect_report();
    assert_eq!(report["benchmark"]["is_partial"], true);
    let truth = sim.end();
    assert_eq!(rows.len(), truth.turns.len());
    let of = |outcome: &str| rows.iter().filter(|row| row["outcome"] == outcome).count();
    let seen = |outcome: &str| truth.turns.iter().filter(|line| line["outcome"] == outcome).count();
    assert_eq!((of("ok"), of("aborted")), (seen("ok"), seen("client_gone")));
    assert!(of("ok") >= 4 && of("aborted") > 0 && of("ok") + of("aborted") == rows.len());
}

#[test]
fn hello_says_who_is_there_and_status_that_nothing_is_going_on() {
    let daemon = Daemon::start();
    let mut client = daemon.connect();
    let hello = client.ok(&json!({"cmd": "hello"}));
    assert_eq!((&hello["pid"], &hello["protocol"]), (&daemon.child.id().into(), &1.into()));
    let status = client.ok(&json!({"cmd": "status"}));
    assert_eq!(status["state"], "idle");
    assert!(status["target"].is_null() && status["verdict"].is_null(), "{status}");
}

#[test]
fn requests_are_answered_in_order_however_they_are_cut() {
    let daemon = Daemon::start();
    let mut client = daemon.connect();
    client.write(b"{\"cmd\":\"hello\"}\n{\"cmd\":\"status\"}\n{\"cmd\":\"no\"}\n{\"cmd\":\"hel");
    assert!(client.expect_ok().get("pid").is_some());
    assert!(client.expect_ok().get("state").is_some());
    client.expect_err("bad_request");
    client.write(b"lo\"");
    client.write(b"}\r\n");
    assert!(client.expect_ok().get("pid").is_some());
}

#[test]
fn a_plan_is_solved_or_refused_without_a_server() {
    let daemon = Daemon::start();
    let mut client = daemon.connect();
    let mut workload =
        json!({"isl": 1000, "osl": 64, "hit_rate": 0.7, "num_turns": 4, "shared_system_prompt_ratio": 0.5});
    let spec = client.ok(&json!({"cmd": "plan", "workload": workload}));
    assert_eq!((&spec["user_tokens_per_turn"], &spec["system_prompt_tokens"]), (&272.into(), &224.into()));
    workload["hit_rate"] = json!(0.999);
    client.send(&json!({"cmd": "plan", "workload": workload}));
    assert!(client.expect_err("infeasible").contains("the nearest that works"));
    workload["hit_rate"] = json!(1.5);
    client.send(&json!({"cmd": "plan", "workload": workload}));
    assert!(client.expect_err("bad_value").contains("hit_rate must be from 0 to 1, got 1.5"));
}

#[test]
fn what_is_no_request_is_refused_and_the_connection_goes_on() {
    let daemon = Daemon::start();
    let mut client = daemon.connect();
    for line in [
        "{\"cmd\":\"status\",\"colour\":1}",
        "{\"cmd\":\"dance\"}",
        "{\"state\":1}",
        "[]",
        "nonsense",
        "",
        "{\"cmd\":\"plan\",\"workload\":{\"isl\":10,\"osl\":1,\"num_turns\":1,\"colour\":1}}",
        "{\"cmd\":\"plan\",\"workload\":{\"isl\":-1,\"osl\":1,\"num_turns\":1}}",
        "{\"cmd\":\"run\",\"plan\":{}}",
        "{\"cmd\":\"smoke\"}",
    ] {
        client.write(format!("{line}\n").as_bytes());
        assert!(client.expect_err("bad_request").starts_with("not a request: "), "{line}");
    }
    client.write(b"\xff\xfe\n");
    client.expect_err("bad_request");
    assert!(client.ok(&json!({"cmd": "hello"})).get("pid").is_some());
}

#[test]
fn a_line_over_a_mebibyte_is_refused_and_ends_the_connection() {
    let daemon = Daemon::start();
    let mut client = daemon.connect();
    let padded = |length: usize| {
        let request = "{\"cmd\":\"hello\"}";
        format!("{request}{}", " ".repeat(length - request.len()))
    };
    client.write(format!("{}\n", padded(LONGEST_LINE)).as_bytes());
    assert!(client.expect_ok().get("pid").is_some(), "the longest line is read");
    client.write(padded(LONGEST_LINE + 1).as_bytes());
    assert!(client.expect_err("bad_request").contains("1048576"));
    assert!(client.is_closed());
    assert_eq!(daemon.state(), "idle", "others are still answered");
}

#[test]
fn a_run_is_answered_by_its_report_and_every_record() {
    let sim = Sim::start(&[support::FAST]);
    let daemon = Daemon::start();
    let mut client = daemon.connect();
    client.send(&run_request(&sim.url, &closed(8)));
    let (report, rows) = client.expect_report();
    assert_eq!(report["benchmark"]["is_partial"], false);
    assert_eq!(report["environment"]["command_line"], json!(["a", "stranger"]));
    let truth = sim.end();
    assert_eq!(rows.len(), truth.turns.len());
    let by_turn = truth.by_turn();
    for row in &rows {
        assert_eq!(row["input_tokens"], by_turn[&support::key(row)]["prompt_tokens"]);
    }
    // The connection serves the next request.
    assert_eq!(client.ok(&json!({"cmd": "status"}))["state"], "idle");
}

#[test]
fn one_thing_goes_on_at_a_time_and_stop_ends_it() {
    let sim = Sim::start(&[SLOW]);
    let daemon = Daemon::start();
    let mut other = daemon.connect();
    other.send(&json!({"cmd": "stop"}));
    other.expect_err("not_running");
    let mut runner = long_run(&daemon, &sim);
    other.send(&run_request(&sim.url, &closed(1)));
    assert!(other.expect_err("busy").contains("a run is going on"));
    other.send(&json!({"cmd": "smoke", "target": {"url": sim.url}}));
    other.expect_err("busy");
    let status = other.ok(&json!({"cmd": "status"}));
    assert!(["warm_up", "measuring"].contains(&status["state"].as_str().unwrap()), "{status}");
    assert_eq!((&status["target"], &status["model"]), (&sim.url.as_str().into(), &"sim".into()));
    let count = |name: &str| status[name].as_u64().unwrap();
    assert!(count("completed") >= 4 && count("sent") >= count("completed"), "{status}");
    let stopping = other.ok(&json!({"cmd": "stop"}));
    assert!((1..=4).contains(&stopping["in_flight"].as_u64().unwrap()), "{stopping}");
    is_partial(&mut runner, sim);
    until("the daemon is idle", || daemon.state() == "idle");
}

#[test]
fn a_watcher_gets_the_state_first_and_the_end_of_the_run_at_last() {
    let sim = Sim::start(&[SLOW]);
    let daemon = Daemon::start();
    let mut watcher = daemon.connect();
    watcher.send(&json!({"cmd": "watch"}));
    let first = watcher.value();
    assert_eq!((&first["event"], &first["state"]), (&"state".into(), &"idle".into()));
    let mut runner = long_run(&daemon, &sim);
    let mut late = daemon.connect();
    late.send(&json!({"cmd": "watch"}));
    let state = late.value();
    assert_eq!(state["event"], "state");
    assert!(state["sent"].as_u64().unwrap() >= 4, "a late watcher gets the state as it is: {state}");
    let mut progress = late.value();
    while progress["event"] != "progress" {
        progress = late.value();
    }
    assert!(progress["completed"].as_u64() >= state["completed"].as_u64());
    daemon.connect().ok(&json!({"cmd": "stop"}));
    let _ = runner.expect_report();
    for watcher in [&mut watcher, &mut late] {
        let mut events = Vec::new();
        while events.last().is_none_or(|last| last != "run_ended") {
            events.push(watcher.value()["event"].as_str().unwrap().to_owned());
        }
        let known = ["progress", "notice", "run_ended"];
        assert!(events.iter().all(|event| known.contains(&event.as_str())), "{events:?}");
    }
    let mut quitter = daemon.connect();
    quitter.ok(&json!({"cmd": "quit"}));
    assert!(watcher.is_closed(), "run_ended was the last event");
}

#[test]
fn a_watcher_hears_of_each_failure() {
    let sim = Sim::start(&[support::FAST, "--max-model-len 150"]);
    let daemon = Daemon::start();
    let mut watcher = daemon.connect();
    watcher.send(&json!({"cmd": "watch"}));
    let mut client = daemon.connect();
    client.send(&run_request(&sim.url, &closed(4)));
    let (report, rows) = client.expect_report();
    assert_eq!(report["benchmark"]["failed_requests"], rows.len());
    let mut failures = 0;
    loop {
        let event = watcher.value();
        match event["event"].as_str().unwrap() {
            "failure" => {
                failures += 1;
                assert_eq!((&event["outcome"], &event["http_status"]), (&"http_status".into(), &400.into()));
                assert!(rows.iter().any(|row| row["session_id"] == event["session_id"]), "{event}");
            }
            "run_ended" => break,
            _ => {}
        }
    }
    assert_eq!(failures, rows.len());
}

#[test]
fn a_client_that_vanishes_takes_its_run_with_it() {
    let sim = Sim::start(&[SLOW]);
    let daemon = Daemon::start();
    let runner = long_run(&daemon, &sim);
    assert_ne!(daemon.state(), "idle");
    drop(runner);
    until("the run is stopped", || daemon.state() == "idle");
    let truth = sim.end();
    let gone = truth.turns.iter().filter(|line| line["outcome"] == "client_gone").count();
    assert!((1..=4).contains(&gone), "{gone} requests in flight were ended");
    assert!(truth.turns.len() < 400, "{} requests of 20,000", truth.turns.len());
}

#[test]
fn smoke_answers_what_the_server_can_do_or_why_it_cannot_be_asked() {
    let sim = Sim::start(&[support::FAST]);
    let daemon = Daemon::start();
    let mut client = daemon.connect();
    let report = client.ok(&json!({"cmd": "smoke", "target": {"url": sim.url}}));
    assert_eq!((&report["model"], &report["has_usage"]), (&"sim".into(), &true.into()));
    client.send(&json!({"cmd": "smoke", "target": {"url": sim.url, "model": "other"}}));
    client.expect_err("unknown_model");
    client.send(&json!({"cmd": "smoke", "target": {"url": support::closed_url()}}));
    client.expect_err("unreachable");
    client.send(&json!({"cmd": "smoke", "target": {"url": "ftp://h"}}));
    client.expect_err("bad_value");
}

#[test]
fn a_run_that_cannot_begin_answers_the_code_of_its_reason() {
    let sim = Sim::start(&[support::FAST, "--api-key open-sesame"]);
    let daemon = Daemon::start();
    let mut client = daemon.connect();
    let mut request = run_request(&sim.url, &closed(1));
    client.send(&request);
    client.expect_err("unauthorized");
    request["plan"]["target"]["url"] = support::closed_url().into();
    client.send(&request);
    client.expect_err("unreachable");
    request["plan"]["load"]["concurrency"] = 0.into();
    client.send(&request);
    assert!(client.expect_err("bad_value").contains("concurrency must be from 1 to 1000000, got 0"));
    let open = json!({"mode": "open", "request_rate_per_s": 5, "duration_s": 5, "warm_up_s": 5});
    client.send(&run_request(&sim.url, &open));
    client.expect_err("bad_value");
    assert_eq!(daemon.state(), "idle");
}

#[test]
fn quit_ends_the_daemon_and_its_run_still_gets_its_report() {
    let sim = Sim::start(&[SLOW]);
    let mut daemon = Daemon::start();
    let mut runner = long_run(&daemon, &sim);
    daemon.connect().ok(&json!({"cmd": "quit"}));
    is_partial(&mut runner, sim);
    assert_eq!(daemon.wait(), Some(0));
    assert!(!daemon.socket.exists(), "its socket goes with it");
}

#[test]
fn sigterm_ends_the_daemon_as_quit_does() {
    let sim = Sim::start(&[SLOW]);
    let mut daemon = Daemon::start();
    let mut runner = long_run(&daemon, &sim);
    daemon.signal(Signal::TERM);
    is_partial(&mut runner, sim);
    assert_eq!(daemon.wait(), Some(0));
    assert!(!daemon.socket.exists());
}

#[test]
fn the_socket_is_its_owners_alone() {
    let daemon = Daemon::start();
    assert_eq!(std::fs::metadata(&daemon.socket).unwrap().permissions().mode() & 0o777, 0o600);
}

/// A second daemon on a path; it must end by itself.
fn second_daemon(socket: &Path) -> Ran {
    command("benchd")
        .args(["--socket", socket.to_str().unwrap()])
        .stdin(Stdio::null())
        .output()
        .unwrap()
        .into()
}

#[test]
fn a_live_daemons_socket_is_not_taken_over_and_a_dead_ones_is() {
    let mut daemon = Daemon::start();
    let second = second_daemon(&daemon.socket);
    assert_eq!(second.code, Some(11), "{second:?}");
    let sentence =
        format!("benchd: a benchd (pid {}) already serves {}", daemon.child.id(), daemon.socket.display());
    assert!(second.stderr.starts_with(&sentence), "{}", second.stderr);
    assert_eq!(daemon.state(), "idle", "the first one still answers");
    daemon.signal(Signal::KILL);
    daemon.wait();
    assert!(daemon.socket.exists(), "a killed daemon leaves its socket behind");
    daemon.child = command("benchd")
        .args(["--socket", daemon.socket.to_str().unwrap()])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("the next one listens", || UnixStream::connect(&daemon.socket).is_ok());
    assert_eq!(daemon.connect().ok(&json!({"cmd": "hello"}))["pid"], daemon.child.id());
}

#[test]
fn a_file_that_is_no_socket_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("precious");
    std::fs::write(&path, "precious").unwrap();
    let ran = second_daemon(&path);
    assert_eq!(ran.code, Some(11), "{ran:?}");
    assert!(ran.stderr.contains("is no socket"), "{}", ran.stderr);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn a_private_daemon_takes_its_secrets_from_its_parent_and_ends_with_it() {
    let sim = Sim::start(&[support::FAST, "--api-key open-sesame"]);
    let mut daemon = Daemon::private(&json!({"api_key": "open-sesame"}));
    let mut client = daemon.connect();
    assert_eq!(client.ok(&json!({"cmd": "smoke", "target": {"url": sim.url}}))["model"], "sim");
    let arguments =
        std::fs::read_to_string(format!("/proc/{}/cmdline", daemon.child.id())).unwrap_or_default();
    let environment =
        std::fs::read_to_string(format!("/proc/{}/environ", daemon.child.id())).unwrap_or_default();
    assert!(!arguments.contains("open-sesame") && !environment.contains("open-sesame"));
    drop(daemon.lifeline.take());
    assert_eq!(daemon.wait(), Some(0));
    assert!(client.is_closed());
    assert_eq!(std::fs::read_dir(daemon.folder.path()).unwrap().count(), 0, "socket and folder are gone");
}

#[test]
fn a_private_daemon_ends_with_its_parent_in_the_middle_of_a_run() {
    let sim = Sim::start(&[SLOW]);
    let mut daemon = Daemon::private(&json!({}));
    let _runner = long_run(&daemon, &sim);
    drop(daemon.lifeline.take());
    daemon.wait();
    assert_eq!(std::fs::read_dir(daemon.folder.path()).unwrap().count(), 0);
    let gone = sim.end().turns.iter().filter(|line| line["outcome"] == "client_gone").count();
    assert!(gone <= 4, "{gone}");
}

#[test]
fn secrets_that_cannot_be_read_are_not_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = command("benchd")
        .args(["--private", "--socket", folder.path().join("b.sock").to_str().unwrap()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"{\"api_key\":\"open-sesame\",\n").unwrap();
    let ran: Ran = child.wait_with_output().unwrap().into();
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""));
    assert!(
        ran.stderr.contains("is not the secrets' JSON") && !ran.stderr.contains("sesame"),
        "{}",
        ran.stderr
    );
}
