//! The real binaries, started as users start them; the simulator's own log, to compare with; and what a saved
//! result says. Nothing here is benchd's own code: figures are taken from JSON and computed anew.

#![allow(dead_code, clippy::unwrap_used)] // each test file uses its part, and may panic

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long a test waits for something that must happen; far beyond what a busy machine needs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The template of the acceptance tests: 7 tokens a request, 5 a message, 5 for the reply's header.
pub(crate) const TEMPLATE: &str = "--template-request 7 --template-message 5 --template-reply 5";
/// A server that answers at once, so that a run takes as long as its schedule.
pub(crate) const FAST: &str = "--ttft-ms 2 --itl-ms 0 --prefill-us-per-token 0";

/// A binary of the workspace, beside the one whose package the test belongs to.
pub(crate) fn binary(name: &str) -> PathBuf {
    let own = option_env!("CARGO_BIN_EXE_benchctl").or(option_env!("CARGO_BIN_EXE_benchd")).unwrap();
    let path = Path::new(own).with_file_name(name);
    assert!(path.exists(), "{} is not there; run `cargo test --workspace`, which builds it", path.display());
    path
}

/// A command with nothing of the tester's own environment that benchd would read.
pub(crate) fn command(name: &str) -> Command {
    let mut command = Command::new(binary(name));
    for variable in [
        "OPENAI_BASE_URL",
        "OPENAI_API_KEY",
        "BENCHD_API_KEY",
        "BENCHD_SOCKET",
        "BENCHD_BIN",
        "BENCHSIM_BIN",
        "HF_TOKEN",
        "HF_HOME",
        "HF_ENDPOINT",
        "HF_HUB_OFFLINE",
    ] {
        command.env_remove(variable);
    }
    command
}

/// Words of a line; none of ours has quotes.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split_whitespace()
}

/// A running simulator that keeps a log of what really happened.
pub(crate) struct Sim {
    child: Child,
    lifeline: Option<ChildStdin>,
    pub(crate) url: String,
    truth: PathBuf,
    pub(crate) folder: tempfile::TempDir,
}

impl Sim {
    /// Starts it; later options win over earlier ones.
    pub(crate) fn start(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let truth = folder.path().join("truth.jsonl");
        let mut child = command("benchsim")
            .args(["--lifeline", "--truth", truth.to_str().unwrap()])
            .args(options.iter().flat_map(|line| words(line)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).expect("the first line says where it listens");
        let url = ready["url"].as_str().unwrap().to_owned();
        let lifeline = child.stdin.take();
        Self { child, lifeline, url, truth, folder }
    }

    /// Requests that have ended so far, preparations too.
    pub(crate) fn so_far(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.truth).unwrap();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Waits until so many requests of sessions have ended.
    pub(crate) fn until_ended(&self, requests: usize) {
        until("requests end", || {
            self.so_far().iter().filter(|line| is_of_a_session(line)).count() >= requests
        });
    }

    /// Waits until so many requests have ended and so many others are being answered. Those that ended before are then
    /// known to have ended on the other side too: a closed loop has sent the next ones.
    pub(crate) fn until_ended_and_running(&self, ended: usize, running: usize) {
        self.until_ended(ended);
        until("the next requests run", || self.metric("vllm:num_requests_running") >= running as f64);
    }

    /// A value of /metrics, by the start of its line.
    fn metric(&self, name: &str) -> f64 {
        let mut socket = TcpStream::connect(self.url.trim_start_matches("http://")).unwrap();
        socket.write_all(b"GET /metrics HTTP/1.1\r\nconnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        socket.read_to_string(&mut text).unwrap();
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Ends it; its log.
    pub(crate) fn end(mut self) -> Truth {
        drop(self.lifeline.take());
        assert!(self.child.wait().unwrap().success());
        Truth::read(&self.truth)
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        // Only when a test failed; else it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The simulator's log.
pub(crate) struct Truth {
    /// Every request, preparations too.
    pub(crate) requests: Vec<Value>,
    /// Those of sessions.
    pub(crate) turns: Vec<Value>,
    /// The last line.
    pub(crate) end: Value,
}

/// Preparations have session ids of their own.
fn is_of_a_session(line: &Value) -> bool {
    line["session"].as_str().is_some_and(|id| id != "probe" && id != "calibration" && id != "smoke")
}

impl Truth {
    pub(crate) fn read(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap();
        let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let end = lines.pop().unwrap();
        assert_eq!(end["end"], true, "the log is whole: {end}");
        lines.remove(0);
        let turns = lines.iter().filter(|line| is_of_a_session(line)).cloned().collect();
        Self { requests: lines, turns, end }
    }

    /// The requests of sessions by session number and turn; each was sent once.
    pub(crate) fn by_turn(&self) -> BTreeMap<Key, &Value> {
        let key = |line: &Value| (number(&line["session"]), turn_of_truth(line));
        let by_turn: BTreeMap<Key, &Value> = self.turns.iter().map(|line| (key(line), line)).collect();
        assert_eq!(by_turn.len(), self.turns.len(), "no turn was sent twice");
        by_turn
    }
}

impl Truth {
    /// Most requests of sessions that were surely in flight at a time: between their first byte and their last token.
    pub(crate) fn most_at_a_time(&self) -> i64 {
        let at = |line: &Value, name: &str| line[name].as_u64().unwrap();
        let steps = |line| [(at(line, "first_byte_ns"), 1), (at(line, "last_write_ns"), -1)];
        let mut steps: Vec<(u64, i64)> = self.turns.iter().flat_map(steps).collect();
        // At the same instant an end comes first.
        steps.sort_unstable();
        let mut now = 0;
        let upto = steps.into_iter().map(|(_, step)| {
            now += step;
            now
        });
        upto.max().unwrap_or(0)
    }
}

/// Session number and turn.
pub(crate) type Key = (u64, u64);

/// A session's number, from its id.
pub(crate) fn number(session_id: &Value) -> u64 {
    session_id.as_str().and_then(|id| id.rsplit('-').next()).unwrap().parse().unwrap()
}

/// Which turn a logged request was: turn k carries k user messages and k − 1 replies, and maybe a system message.
pub(crate) fn turn_of_truth(line: &Value) -> u64 {
    line["messages"].as_u64().unwrap().div_ceil(2)
}

/// What came of benchctl.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Ran {
    /// The one sentence on stderr of a command that was refused, which begins with `benchctl: `.
    #[track_caller]
    pub(crate) fn sentence(&self, code: i32) -> &str {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stdout, "", "nothing to print");
        let lines: Vec<&str> = self.stderr.lines().collect();
        let [line] = lines[..] else { panic!("one sentence, not {lines:?}") };
        line.strip_prefix("benchctl: ").unwrap_or_else(|| panic!("{line}"))
    }
}

/// Runs benchctl to its end with the words of these lines as its arguments.
pub(crate) fn benchctl(lines: &[&str]) -> Ran {
    benchctl_with(&[], lines)
}

/// The same with variables set.
pub(crate) fn benchctl_with(variables: &[(&str, &str)], lines: &[&str]) -> Ran {
    let mut command = command("benchctl");
    command.envs(variables.iter().copied());
    command.args(lines.iter().flat_map(|line| words(line))).stdin(Stdio::null()).output().unwrap().into()
}

/// A saved result.
pub(crate) struct Saved(pub(crate) Value);

impl Saved {
    pub(crate) fn read(path: &Path) -> Self {
        Self(serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
    }

    /// A value by its path, such as `/load/sent`.
    #[track_caller]
    pub(crate) fn at(&self, path: &str) -> &Value {
        self.0.pointer(path).unwrap_or_else(|| panic!("{path} is not there"))
    }

    #[track_caller]
    pub(crate) fn count(&self, path: &str) -> u64 {
        self.at(path).as_u64().unwrap_or_else(|| panic!("{path} is {}", self.at(path)))
    }

    #[track_caller]
    pub(crate) fn number(&self, path: &str) -> f64 {
        self.at(path).as_f64().unwrap_or_else(|| panic!("{path} is {}", self.at(path)))
    }

    pub(crate) fn rows(&self) -> &[Value] {
        self.at("/raw_metrics").as_array().unwrap()
    }

    /// Rows of one phase.
    pub(crate) fn phase(&self, phase: &str) -> Vec<&Value> {
        self.rows().iter().filter(|row| row["phase"] == phase).collect()
    }

    /// Prompt tokens of the plan for a turn, from 1.
    pub(crate) fn planned_total(&self, turn: u64) -> &Value {
        &self.at("/spec/per_turn")[usize::try_from(turn - 1).unwrap()]["total"]
    }

    /// Codes of the verdict's reasons.
    pub(crate) fn reasons(&self) -> Vec<&str> {
        self.at("/verdict/reasons").as_array().unwrap().iter().map(|r| r["code"].as_str().unwrap()).collect()
    }
}

/// Session number and turn of a row that was sent.
pub(crate) fn key(row: &Value) -> Key {
    (number(&row["session_id"]), row["turn"].as_u64().unwrap())
}

/// A run that went well: what it printed, what it saved, and the simulator's log.
pub(crate) struct Finished {
    pub(crate) ran: Ran,
    pub(crate) saved: Saved,
    pub(crate) truth: Truth,
}

/// Runs a benchmark against a simulator of its own, with the built-in tokenizer unless another is given.
pub(crate) fn run(sim: &[&str], lines: &[&str]) -> Finished {
    let sim = Sim::start(sim);
    let file = sim.folder.path().join("result.json");
    let (url, path) = (sim.url.clone(), file.to_str().unwrap().to_owned());
    let mut all = vec!["run -u", &url, "--save-result", &path];
    if !lines.iter().any(|line| line.contains("--tokenizer")) {
        all.push("--tokenizer builtin");
    }
    all.extend_from_slice(lines);
    let ran = benchctl(&all);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let saved = Saved::read(&file);
    Finished { ran, saved, truth: sim.end() }
}

/// Waits for something that must come; looks every few milliseconds.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: not within {} s", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A URL where nothing listens.
pub(crate) fn closed_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

/// Two numbers that differ by no more than this.
#[track_caller]
pub(crate) fn near(got: f64, want: f64, tolerance: f64, what: &str) {
    assert!((got - want).abs() <= tolerance, "{what}: {got}, not {want} ± {tolerance}");
}
