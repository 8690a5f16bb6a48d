//! What was observed of one request. Made once by the exchange and never changed; [`crate::metric`] derives
//! every figure from it, [`Row`] is its line on the wire and in a saved file.

use serde::{Deserialize, Serialize};

use crate::gaps::Gaps;
use crate::metric;

/// Everything observed of one request: raw instants, counts, outcome.
///
/// Instants are nanoseconds from the run's origin on the monotonic clock. `None` means that it did not happen.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Session number from 0, in the order of their starts; absent for a refused slot, which took no turn.
    pub session: Option<u64>,
    /// Turn of that session, from 1; absent for a refused slot.
    pub turn: Option<u32>,
    /// When it should have gone out.
    pub due_ns: i64,
    /// Time of its lateness that it waited for a place under `max_concurrency`.
    pub cap_wait_ns: u64,
    /// When it was handed to the HTTP client.
    pub sent_ns: Option<i64>,
    /// Arrival of the first content event.
    pub first_token_ns: Option<i64>,
    /// Arrival of the first content event that holds some of the answer: reasoning is not of it.
    pub first_answer_ns: Option<i64>,
    /// Arrival of the content event that the first-chunk threshold names.
    pub first_chunk_ns: Option<i64>,
    /// Arrival of the last content event.
    pub last_token_ns: Option<i64>,
    /// When the outcome was known; absent for `refused` and `aborted`.
    pub completed_ns: Option<i64>,
    /// Content events.
    pub events: u32,
    /// Reads of the connection that brought content events; fewer than events where several came at once.
    pub reads: u32,
    /// Whether the answer came whole, although a stream was asked for: its first token is its last.
    pub is_whole: bool,
    /// Gaps between successive content events.
    pub gaps: Gaps,
    /// Tokens of each content event, when they are not one each.
    pub event_tokens: Option<Box<[f32]>>,
    /// What became of it.
    pub outcome: Outcome,
    /// Details of a failure, secrets removed.
    pub error: Option<Box<str>>,
    /// The server's finish reason.
    pub finish_reason: Option<Box<str>>,
    /// Prompt tokens of the plan for this turn.
    pub planned_input_tokens: Option<u32>,
    /// Prompt tokens as the server counted them; without usage, by the tokenizer.
    pub input_tokens: Option<u32>,
    /// Who counted `input_tokens`.
    pub input_tokens_source: Option<TokenSource>,
    /// Output tokens.
    pub output_tokens: Option<u32>,
    /// Who counted `output_tokens`.
    pub output_tokens_source: Option<TokenSource>,
    /// Of the output tokens, those of reasoning, as the server reported them.
    pub reasoning_tokens: Option<u32>,
    /// Cached prompt tokens as the server reported them.
    pub cached_tokens: Option<u32>,
    /// Cached prompt tokens that an ideal cache would have had, given the replies as they came.
    pub expected_cached_tokens: Option<u32>,
    /// Tokens of the reply when it is tokenised again as history.
    pub reply_tokens: Option<u32>,
    /// Whether a connection was made for it.
    pub new_connection: bool,
    /// Whether it was sent again after a kept connection turned out to be closed.
    pub resent: bool,
}

/// Who counted tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenSource {
    /// The server's `usage`.
    Usage,
    /// The tokenizer, on the text.
    Tokenizer,
    /// Content events, one token each.
    Events,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    /// A whole answer.
    Ok,
    /// No connection.
    Connect,
    /// No TLS session.
    Tls,
    /// Not done within the request timeout.
    Timeout,
    /// A status other than 2xx.
    HttpStatus(u16),
    /// An `error` object inside a stream with status 200.
    StreamError,
    /// The stream ended with neither finish reason nor `[DONE]`.
    Truncated,
    /// The connection broke.
    Reset,
    /// The answer could not be read as what it claims to be.
    Decode,
    /// No content event and no output tokens in usage.
    Empty,
    /// Not sent: over `max_in_flight`.
    Refused,
    /// Ended by us.
    Aborted,
}

impl Outcome {
    /// Its name on the wire; the status code stands apart.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Connect => "connect",
            Outcome::Tls => "tls",
            Outcome::Timeout => "timeout",
            Outcome::HttpStatus(_) => "http_status",
            Outcome::StreamError => "stream_error",
            Outcome::Truncated => "truncated",
            Outcome::Reset => "reset",
            Outcome::Decode => "decode",
            Outcome::Empty => "empty",
            Outcome::Refused => "refused",
            Outcome::Aborted => "aborted",
        }
    }

    /// A success.
    pub fn is_ok(self) -> bool {
        self == Outcome::Ok
    }

    /// A success or a failure: something that the server's answer, or its lack, decided.
    pub fn is_completion(self) -> bool {
        !matches!(self, Outcome::Refused | Outcome::Aborted)
    }

    /// A failure.
    pub fn is_failure(self) -> bool {
        self.is_completion() && !self.is_ok()
    }
}

/// Part of a run, fixed by a request's due instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Before the load was steady.
    WarmUp,
    /// What the statistics are made of.
    Measured,
    /// After the closed loop ran out of sessions to start.
    Drain,
}

impl Phase {
    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Phase::WarmUp => "warm_up",
            Phase::Measured => "measured",
            Phase::Drain => "drain",
        }
    }
}

/// Where the phases of a run lie, in nanoseconds from its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phases {
    /// First instant of the measured part; `i64::MAX`: never reached.
    pub measured_from_ns: i64,
    /// First instant that is no longer part of it.
    pub measured_to_ns: i64,
}

impl Phases {
    /// The phase of a request due at that instant.
    pub fn of(&self, due_ns: i64) -> Phase {
        if due_ns >= self.measured_to_ns {
            Phase::Drain
        } else if due_ns >= self.measured_from_ns {
            Phase::Measured
        } else {
            Phase::WarmUp
        }
    }

    /// Length of the measured part in seconds.
    pub fn measured_s(&self) -> f64 {
        metric::seconds(self.measured_to_ns.saturating_sub(self.measured_from_ns).max(0))
    }
}

/// One request as a line of `raw_metrics`. `null` means that it did not happen or is not known, never 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Value of the request's `X-Session-Id` header; absent for a refused slot.
    pub session_id: Option<String>,
    /// From 1.
    pub turn: Option<u32>,
    /// Part of the run, by `due_ms`.
    pub phase: Phase,
    /// Name of the outcome.
    pub outcome: String,
    /// Status code of an `http_status` outcome.
    pub http_status: Option<u16>,
    /// Details of a failure.
    pub error: Option<String>,
    /// When it should have gone out, in ms from the run's origin.
    pub due_ms: f64,
    /// When it went out, in ms from the run's origin.
    pub sent_ms: Option<f64>,
    /// When it went out, in ms of the Unix epoch.
    pub start_time_ms: Option<f64>,
    /// When its outcome was known, in ms from the run's origin.
    pub completed_ms: Option<f64>,
    /// Wait for a place under `max_concurrency`.
    pub cap_wait_ms: f64,
    /// Lateness of the client itself.
    pub dispatch_lag_ms: Option<f64>,
    /// First token − sent.
    pub ttft_ms: Option<f64>,
    /// First content event of the answer, reasoning left out − sent.
    #[serde(default)]
    pub ttfo_ms: Option<f64>,
    /// Content event number `first_chunk_threshold` − sent.
    pub fc_ms: Option<f64>,
    /// (last token − first token) / (output tokens − 1).
    pub tpot_ms: Option<f64>,
    /// Mean gap by token, weighted by the tokens of each event.
    pub itl_ms: Option<f64>,
    /// Last token − sent.
    pub latency_ms: Option<f64>,
    /// Prompt tokens.
    pub input_tokens: Option<u32>,
    /// Who counted them.
    pub input_tokens_source: Option<TokenSource>,
    /// Prompt tokens of the plan.
    pub planned_input_tokens: Option<u32>,
    /// Output tokens.
    pub output_tokens: Option<u32>,
    /// Who counted them.
    pub output_tokens_source: Option<TokenSource>,
    /// Of the output tokens, those of reasoning, as reported.
    #[serde(default)]
    pub reasoning_tokens: Option<u32>,
    /// Cached prompt tokens as reported.
    pub cached_tokens: Option<u32>,
    /// Cached prompt tokens of an ideal cache, given the replies as they came.
    pub expected_cached_tokens: Option<u32>,
    /// Tokens of the reply when tokenised again.
    pub reply_tokens: Option<u32>,
    /// Content events.
    pub events: u32,
    /// Reads of the connection that brought them.
    #[serde(default)]
    pub reads: u32,
    /// Whether the answer came whole, although a stream was asked for.
    #[serde(default)]
    pub is_whole: bool,
    /// The server's finish reason.
    pub finish_reason: Option<String>,
    /// Whether a connection was made for it.
    pub new_connection: bool,
    /// Whether it was sent again on a new connection.
    pub resent: bool,
    /// Gaps between content events, when asked for (`save_events`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_gaps_ms: Option<Vec<f64>>,
    /// Tokens of each content event, when asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_tokens: Option<Vec<f32>>,
}

/// What turns a record into a row beside the record itself.
#[derive(Clone, Debug)]
pub struct RowContext {
    /// Phases of the run.
    pub phases: Phases,
    /// Prefix of session ids.
    pub session_prefix: String,
    /// The run's origin, in ms of the Unix epoch.
    pub origin_epoch_ms: f64,
    /// Put event gaps and tokens into the row.
    pub save_events: bool,
}

/// The `X-Session-Id` of a session: unique over runs by the prefix, over a run by the number.
pub fn session_id(prefix: &str, number: u64) -> String {
    format!("{prefix}-{number}")
}

impl Row {
    /// The line of a record.
    pub fn new(record: &Record, context: &RowContext) -> Row {
        let ms = metric::ms;
        Row {
            session_id: record.session.map(|n| session_id(&context.session_prefix, n)),
            turn: record.turn,
            phase: context.phases.of(record.due_ns),
            outcome: record.outcome.name().to_owned(),
            http_status: match record.outcome {
                Outcome::HttpStatus(code) => Some(code),
                _ => None,
            },
            error: record.error.as_deref().map(str::to_owned),
            due_ms: ms(record.due_ns),
            sent_ms: record.sent_ns.map(ms),
            start_time_ms: record.sent_ns.map(|ns| context.origin_epoch_ms + ms(ns)),
            completed_ms: record.completed_ns.map(ms),
            cap_wait_ms: metric::cap_wait_ms(record),
            dispatch_lag_ms: metric::dispatch_lag_ms(record),
            ttft_ms: metric::ttft_ms(record),
            ttfo_ms: metric::ttfo_ms(record),
            fc_ms: metric::fc_ms(record),
            tpot_ms: metric::tpot_ms(record),
            itl_ms: metric::mean_itl_ms(record),
            latency_ms: metric::latency_ms(record),
            input_tokens: record.input_tokens,
            input_tokens_source: record.input_tokens_source,
            planned_input_tokens: record.planned_input_tokens,
            output_tokens: record.output_tokens,
            output_tokens_source: record.output_tokens_source,
            reasoning_tokens: record.reasoning_tokens,
            cached_tokens: record.cached_tokens,
            expected_cached_tokens: record.expected_cached_tokens,
            reply_tokens: record.reply_tokens,
            events: record.events,
            reads: record.reads,
            is_whole: record.is_whole,
            finish_reason: record.finish_reason.as_deref().map(str::to_owned),
            new_connection: record.new_connection,
            resent: record.resent,
            event_gaps_ms: context.save_events.then(|| record.gaps.iter().map(metric::ms_of_gap).collect()),
            event_tokens: context.save_events.then(|| match &record.event_tokens {
                Some(tokens) => tokens.to_vec(),
                None => vec![1.0; record.events as usize],
            }),
        }
    }
}
