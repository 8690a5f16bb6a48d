//! The messages: requests, replies, events, error codes. One JSON object a line; see the crate's front page.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::plan::{Plan, Target, Workload};
use crate::report::Verdict;

/// Raised when an old peer could misread a new one; compared after a failure.
pub const PROTOCOL_VERSION: u32 = 1;

/// Longest line that the daemon reads, in bytes without the newline; a longer one closes the connection.
pub const MAX_REQUEST_BYTES: usize = 1 << 20;

/// What a client may ask.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Who is there? Answers [`Hello`].
    Hello {},
    /// What is going on? Answers [`Status`].
    Status {},
    /// Solve a workload without a server. Answers [`crate::spec::Spec`].
    Plan {
        /// The workload.
        workload: Workload,
    },
    /// Run a benchmark to its end. Answers a [`crate::report::Report`], then record lines, then an [`End`].
    Run {
        /// What to do.
        plan: Box<Plan>,
        /// The client's command line, secrets removed, for the report.
        #[serde(default)]
        command_line: Vec<String>,
    },
    /// One small request. Answers a [`crate::report::SmokeReport`].
    Smoke {
        /// The server.
        target: Box<Target>,
    },
    /// Turn this connection into a stream of [`Event`]s, state first.
    Watch {},
    /// End the run that is going on; its own connection gets the partial report. Answers [`Stopping`].
    Stop {},
    /// End the daemon, as SIGTERM does. Answers [`Stopping`].
    Quit {},
}

/// Answer of `hello`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of benchd.
    pub version: String,
    /// [`PROTOCOL_VERSION`].
    pub protocol: u32,
    /// Process id.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: f64,
}

/// What the daemon is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Nothing.
    #[default]
    Idle,
    /// Finding out about the server and the tokenizer.
    Preparing,
    /// Load is on, statistics are not.
    WarmUp,
    /// Load is on and counts.
    Measuring,
    /// No new requests; what is in flight is awaited.
    Draining,
    /// A smoke request is under way.
    Smoking,
}

/// Answer of `status`, and of each `progress` event.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// What the daemon is doing.
    pub state: State,
    /// Base URL of the server under test.
    pub target: Option<String>,
    /// Model in use.
    pub model: Option<String>,
    /// Open loop: slots a second asked for.
    pub asked_rate_per_s: Option<f64>,
    /// Successful completions a second over the last seconds.
    pub achieved_rate_per_s: Option<f64>,
    /// Seconds since the load began.
    pub elapsed_s: f64,
    /// Requests that the run will send, when that is known beforehand.
    pub planned: Option<u64>,
    /// Requests sent.
    pub sent: u64,
    /// Sent, outcome not yet known.
    pub in_flight: u64,
    /// Completions, failures included.
    pub completed: u64,
    /// Of these, failures.
    pub failed: u64,
    /// Refused slots.
    pub refused: u64,
    /// Completions of requests due in the measured part.
    pub measured: u64,
    /// Sessions ended.
    pub sessions_ended: u64,
    /// 99th percentile of the client's own lateness over the last seconds.
    pub dispatch_lag_p99_ms: Option<f64>,
    /// Seconds that are left, as far as can be told.
    pub eta_s: Option<f64>,
    /// The verdict so far.
    pub verdict: Option<Verdict>,
}

/// A line of a connection that watches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The state when watching began; the first event.
    State(Status),
    /// The state now; at most one a second.
    Progress(Status),
    /// Something that a person should read, such as a value that was changed.
    Notice {
        /// One sentence.
        text: String,
    },
    /// A request failed.
    Failure {
        /// Its session's `X-Session-Id`.
        session_id: Option<String>,
        /// Its turn.
        turn: Option<u32>,
        /// Name of the outcome.
        outcome: String,
        /// Status of an `http_status`.
        http_status: Option<u16>,
        /// Details, secrets removed.
        error: Option<String>,
    },
    /// The run has ended; its report goes to the connection that asked for it.
    RunEnded {},
    /// This reader fell behind and is being disconnected.
    Dropped {
        /// One sentence.
        reason: String,
    },
}

/// Answer of `stop` and `quit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopping {
    /// Requests in flight that are being ended.
    pub in_flight: u64,
}

/// Last line of a record stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Record lines before it.
    pub records: u64,
    /// CRC-32 (IEEE) of their bytes, newlines included, as eight lower-case hex digits.
    pub crc32: String,
}

/// One reply line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Done; the value that the request's description names.
    Ok(Box<RawValue>),
    /// Not done.
    Err(Failure),
}

/// The last line of a record stream, tagged so that it cannot be taken for a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndLine {
    /// Count and checksum.
    pub end: End,
}

/// Why a request was not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// For programs.
    pub code: ErrorCode,
    /// For people: one sentence with the value, the bound and the way out.
    pub message: String,
}

/// The closed set of error codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The line is not a request.
    BadRequest,
    /// A value is out of its bounds.
    BadValue,
    /// No whole numbers of tokens give this workload.
    Infeasible,
    /// Something else is going on.
    Busy,
    /// There is nothing to stop.
    NotRunning,
    /// The server cannot be reached.
    Unreachable,
    /// The server refused the key (401, 403).
    Unauthorized,
    /// The server does not know the model.
    UnknownModel,
    /// The server refused the request for another reason, or its answer could not be used.
    Server,
    /// No tokenizer, or none that gives exact lengths.
    Tokenizer,
    /// The daemon is going down, or the run was stopped before its load began.
    Stopped,
    /// A fault of benchd.
    Internal,
}

/// First line that a private daemon reads from its standard input: what must not stand in an argument list.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Secrets {
    /// Sent as `Authorization: Bearer …`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key: Option<String>,
    /// Secret headers, name and value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<(String, String)>,
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets(..)")
    }
}

impl Failure {
    /// A failure with its sentence.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Failure { code, message: message.into() }
    }
}
