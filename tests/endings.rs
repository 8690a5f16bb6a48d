//! How a run ends before its end: by a signal, by the death of its parent, by a server that answers nothing. What was
//! measured until then is printed and saved, and nothing is left behind.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use support::{Ran, Saved, Sim, benchctl, command, key, until};

/// A server whose replies take two seconds.
const SLOW: &str = "--ttft-ms 20 --itl-ms 20 --prefill-us-per-token 0";
const LONG: &str = "--isl 200 --osl 100 --num-turns 2 --tokenizer builtin";

/// A benchctl that runs in the background.
struct Running {
    child: Child,
    folder: TempDir,
}

impl Running {
    fn start(sim: &Sim, line: &str) -> Running {
        let folder = tempfile::tempdir().unwrap();
        let child = command("benchctl")
            .args([
                "run",
                "-u",
                &sim.url,
                "--save-result",
                folder.path().join("result.json").to_str().unwrap(),
            ])
            .args(LONG.split(' ').chain(line.split(' ')))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Running { child, folder }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// What came of it, and the folder that it saved to.
    fn end(self) -> (Ran, TempDir) {
        (self.child.wait_with_output().unwrap().into(), self.folder)
    }
}

/// The partial report is there, and agrees with what the simulator saw.
fn is_partial(ran: &Ran, folder: &Path, sim: Sim) -> Saved {
    let file = folder.join("result.json");
    let saved = Saved::read(&file);
    assert_eq!(saved.at("/benchmark/is_partial"), true);
    assert!(saved.reasons().contains(&"partial"), "{:?}", saved.reasons());
    assert!(ran.stdout.contains("the run was stopped"), "{}", ran.stdout);
    assert!(ran.stdout.contains("Latency (ms"), "the report is whole: {}", ran.stdout);
    assert!(ran.stdout.contains(file.to_str().unwrap()), "it says where it was saved: {}", ran.stdout);
    let truth = sim.end();
    let by_turn = truth.by_turn();
    assert_eq!(saved.rows().len(), by_turn.len());
    let mut outcomes: BTreeMap<&str, u64> = BTreeMap::new();
    for row in saved.rows() {
        let outcome = row["outcome"].as_str().unwrap();
        *outcomes.entry(outcome).or_default() += 1;
        let seen = by_turn[&key(row)]["outcome"].as_str().unwrap();
        match outcome {
            "ok" => assert_eq!(seen, "ok", "{row}"),
            "aborted" => {
                // The last token may have been on its way.
                assert!(["client_gone", "ok"].contains(&seen), "{seen}: {row}");
                assert!(row["completed_ms"].is_null(), "what we ended has no completion: {row}");
            }
            other => panic!("{other}: {row}"),
        }
    }
    assert_eq!(outcomes["aborted"], saved.count("/benchmark/aborted_requests"));
    assert!(outcomes["ok"] >= 4, "{outcomes:?}");
    saved
}

#[test]
fn ctrl_c_prints_and_saves_what_was_measured() {
    let sim = Sim::start(&[SLOW]);
    let running = Running::start(&sim, "--concurrency 4 --num-sessions 1000");
    sim.until_ended_and_running(4, 4);
    running.signal(Signal::INT);
    let (ran, folder) = running.end();
    assert_eq!(ran.code, Some(130), "{ran:?}");
    is_partial(&ran, folder.path(), sim);
}

#[test]
fn sigterm_does_the_same_with_its_own_code() {
    let sim = Sim::start(&[SLOW]);
    let running = Running::start(&sim, "--request-rate 5 --duration 600");
    sim.until_ended_and_running(5, 4);
    running.signal(Signal::TERM);
    let (ran, folder) = running.end();
    assert_eq!(ran.code, Some(143), "{ran:?}");
    let saved = is_partial(&ran, folder.path(), sim);
    let count = |name: &str| saved.count(&format!("/load/{name}"));
    assert_eq!(count("planned_slots"), count("sent") + count("refused") + count("unsent"), "up to the stop");
    assert!(saved.number("/benchmark/measured_s") < 600.0);
}

#[test]
fn a_signal_before_the_load_ends_at_once_and_leaves_no_file() {
    let sim = Sim::start(&["--loading-s 600"]);
    let running = Running::start(&sim, "--concurrency 4 --num-sessions 4 --ready-timeout 600");
    until("benchd asks the server", || sim.so_far().iter().any(|line| line["status"] == 503));
    running.signal(Signal::INT);
    let (ran, folder) = running.end();
    assert_eq!(ran.code, Some(130), "{ran:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no half-written file either");
}

/// A process by its id and the instant of its start, which no later process of the same id has.
#[derive(Debug)]
struct Process {
    pid: u32,
    name: String,
    parent: u32,
    started: String,
    is_dead: bool,
}

impl Process {
    /// From /proc; none when there is no such process.
    fn find(pid: u32) -> Option<Process> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (before, after) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = after.split(' ').collect();
        Some(Process {
            pid,
            name: before.split_once('(')?.1.to_owned(),
            parent: fields[1].parse().ok()?,
            started: fields[19].to_owned(),
            // A zombie has ended; nobody has asked for its code yet.
            is_dead: matches!(fields[0], "Z" | "X"),
        })
    }

    fn has_ended(&self) -> bool {
        Process::find(self.pid).is_none_or(|now| now.is_dead || now.started != self.started)
    }
}

fn children(parent: u32) -> Vec<Process> {
    let all = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    all.filter_map(Process::find).filter(|process| process.parent == parent).collect()
}

#[test]
#[cfg(target_os = "linux")] // reads /proc
fn killing_benchctl_ends_its_benchd_and_its_benchsim() {
    let folder = tempfile::tempdir().unwrap();
    let truth = folder.path().join("truth.jsonl");
    let mut benchctl = command("benchctl")
        .arg("run")
        .arg(format!("--sim={SLOW} --truth {}", truth.display()))
        .args(LONG.split(' '))
        .args(["--concurrency", "4", "--num-sessions", "1000"])
        .env("XDG_RUNTIME_DIR", folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("the load is on", || std::fs::read_to_string(&truth).is_ok_and(|text| text.lines().count() > 10));
    let started = children(benchctl.id());
    let mut names: Vec<&str> = started.iter().map(|process| process.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["benchd", "benchsim"]);
    benchctl.kill().unwrap();
    benchctl.wait().unwrap();
    for process in &started {
        until(&format!("{process:?} ends"), || process.has_ended());
    }
    let is_folder_of_a_socket = |name: &str| name.starts_with("benchctl-");
    let left =
        std::fs::read_dir(folder.path()).unwrap().filter_map(|e| e.ok()?.file_name().into_string().ok());
    assert_eq!(left.filter(|name| is_folder_of_a_socket(name)).count(), 0, "the socket's folder is gone too");
}

#[test]
fn a_run_in_which_every_request_failed_says_why() {
    let sim = Sim::start(&["--max-model-len 250"]);
    let load = "--isl 300 --osl 10 --concurrency 2 --num-sessions 4 --tokenizer builtin -q";
    let ran = benchctl(&["run -u", &sim.url, load]);
    assert_eq!(ran.code, Some(5), "{ran:?}");
    let lines: Vec<&str> = ran.stderr.lines().collect();
    let [line] = lines[..] else { panic!("one sentence, not {lines:?}") };
    assert!(
        line.starts_with("benchctl: every request failed (6 of 6), most often with http_status 400: "),
        "{line}"
    );
    assert!(ran.stdout.contains("http_status 400: 6"), "{}", ran.stdout);
    let truth = sim.end();
    assert_eq!(truth.turns.iter().filter(|line| line["status"] == 400).count(), 6);
}

#[test]
fn a_server_that_goes_away_during_a_run_is_a_failure_of_each_request() {
    let sim = Sim::start(&["--ttft-ms 20 --itl-ms 2 --prefill-us-per-token 0"]);
    let running = Running::start(&sim, "--request-rate 20 --duration 3");
    sim.until_ended(5);
    let answered = sim.end().turns.iter().filter(|line| line["outcome"] == "ok").count();
    let (ran, folder) = running.end();
    // Some requests were answered, so this is a result, which says that it is not to be trusted.
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.starts_with("verdict: suspect"), "{}", ran.stdout);
    let saved = Saved::read(&folder.path().join("result.json"));
    assert!(saved.reasons().contains(&"errors"), "{:?}", saved.reasons());
    assert_eq!(saved.rows().len(), 60, "the rate holds, whatever the server does");
    let with = |outcomes: &[&str]| {
        saved.rows().iter().filter(|row| outcomes.contains(&row["outcome"].as_str().unwrap())).count()
    };
    assert_eq!(with(&["ok"]), answered);
    assert!(with(&["connect"]) > 0, "nothing listens any more");
    assert_eq!(with(&["ok", "connect", "reset", "truncated"]), 60, "{}", saved.at("/failures"));
}

#[test]
fn a_run_in_which_more_fail_than_allowed_stops_and_reports_what_there_is() {
    for (limit, least) in [("--max-errors 5", 6), ("--max-error-rate 0.2", 4)] {
        let sim = Sim::start(&["--ttft-ms 5 --itl-ms 1 --fault status:500=0.5"]);
        let running = Running::start(&sim, &format!("--concurrency 4 --num-sessions 150 {limit}"));
        let (ran, folder) = running.end();
        assert_eq!(ran.code, Some(5), "{ran:?}");
        assert!(ran.stderr.contains("stopped because too many requests failed"), "{}", ran.stderr);
        let saved = Saved::read(&folder.path().join("result.json"));
        assert_eq!(saved.at("/benchmark/error_limit_reached"), true);
        assert!(saved.count("/benchmark/failed_requests") >= least);
        assert!(saved.reasons().contains(&"partial"));
        // Of those in flight at the stop, some may have been refused before benchd gave them up.
        let refused = sim.end().by_turn().values().filter(|line| line["status"] == 500).count() as u64;
        let failed = saved.count("/benchmark/failed_requests");
        assert!(
            (failed..=failed + saved.count("/benchmark/aborted_requests")).contains(&refused),
            "{refused}"
        );
    }
}

#[test]
#[cfg(target_os = "linux")] // reads /proc
fn a_run_whose_own_simulator_dies_is_no_success() {
    let folder = tempfile::tempdir().unwrap();
    let truth = folder.path().join("truth.jsonl");
    let benchctl = command("benchctl")
        .arg("run")
        .arg(format!("--sim=--truth {} {SLOW}", truth.display()))
        .args("--concurrency 2 --duration 4 --isl 100 --osl 5".split(' '))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Some requests have been answered by then.
    until("the load is on", || std::fs::read_to_string(&truth).is_ok_and(|text| text.lines().count() > 8));
    let sim = children(benchctl.id()).into_iter().find(|process| process.name == "benchsim").unwrap();
    kill_process(Pid::from_raw(i32::try_from(sim.pid).unwrap()).unwrap(), Signal::KILL).unwrap();
    let ran: Ran = benchctl.wait_with_output().unwrap().into();
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("benchsim ended during the run (signal 9)"), "{}", ran.stderr);
}
