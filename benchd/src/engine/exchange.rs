//! One request and its answer: sends a body, reads the stream, stamps what arrives, and says what became of it.
//! Any schedule may call it any number of times; it knows nothing of sessions, windows or statistics.

use bytes::Bytes;
use proto::gaps::Gaps;
use proto::record::Outcome;
use reqwest::header::HeaderValue;
use tokio_util::sync::CancellationToken;

use crate::engine::chunk::{Chunk, Usage, error_text};
use crate::engine::clock::Clock;
use crate::engine::connect;
use crate::engine::server::{Server, chain};
use crate::engine::sse::SseDecoder;

/// Most bytes of an error's body that are read; the message lies at its beginning.
const ERROR_BODY_BYTES: usize = 64 << 10;
/// Most bytes of white space before a body that are read to learn its form.
const BEGINNING: usize = 64 << 10;
/// Longest answer that is no stream, in bytes.
const WHOLE_BODY_BYTES: usize = 256 << 20;
/// How long the end of a finished answer is awaited so that its connection can be used again.
const TAIL: std::time::Duration = std::time::Duration::from_secs(1);

/// A request to send.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// The whole JSON body.
    pub body: Bytes,
    /// Value of `X-Session-Id`.
    pub session_id: HeaderValue,
    /// Content event at which the first-chunk instant is taken.
    pub first_chunk_threshold: u32,
    /// Content events to expect, to reserve room.
    pub expected_events: u32,
}

/// What was seen of a request. Instants are ns of the run's clock.
#[derive(Debug)]
pub struct Observed {
    /// Handed to the HTTP client.
    pub sent_ns: i64,
    /// First content event.
    pub first_token_ns: Option<i64>,
    /// First content event that holds some of the answer.
    pub first_answer_ns: Option<i64>,
    /// Content event number `first_chunk_threshold`.
    pub first_chunk_ns: Option<i64>,
    /// Last content event.
    pub last_token_ns: Option<i64>,
    /// Outcome known; absent when we ended it.
    pub completed_ns: Option<i64>,
    /// Content events.
    pub events: u32,
    /// Reads that brought some.
    pub reads: u32,
    /// Whether the answer was no stream.
    pub is_whole: bool,
    /// Gaps between them.
    pub gaps: Gaps,
    /// Output text: the answer, and what is no part of it.
    pub text: Text,
    /// Completion tokens as each content event told them (`continuous_usage_stats`); empty when one did not.
    pub usage_steps: Vec<u32>,
    /// The last usage seen.
    pub usage: Option<Usage>,
    /// The server's finish reason.
    pub finish_reason: Option<Box<str>>,
    /// What became of it.
    pub outcome: Outcome,
    /// Details of a failure, secrets removed.
    pub error: Option<Box<str>>,
    /// Whether a connection was made for it.
    pub new_connection: bool,
    /// Whether it was sent again.
    pub resent: bool,
}

/// The output's text, cut into its events.
#[derive(Debug, Default)]
pub struct Text {
    /// What a later turn carries as history.
    pub answer: String,
    /// Reasoning and tool calls.
    pub other: String,
    /// For each content event: length of `answer` and of `other` at its end.
    pub ends: Vec<(u32, u32)>,
}

impl Text {
    /// The text of each content event.
    pub fn events(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut from = (0, 0);
        self.ends.iter().map(move |(answer, other)| {
            let to = (*answer as usize, *other as usize);
            let event = (&self.answer[from.0..to.0], &self.other[from.1..to.1]);
            from = to;
            event
        })
    }
}

/// The unread end of an answer whose outcome is known.
#[derive(Debug)]
pub struct Tail(Option<reqwest::Response>);

impl Tail {
    /// Reads the end, so that the connection goes back to the pool; gives up on it after a moment.
    pub async fn finish(self) {
        if let Some(mut response) = self.0 {
            let _ =
                tokio::time::timeout(TAIL, async { while let Ok(Some(_)) = response.chunk().await {} }).await;
        }
    }
}

/// Sends a request and follows it to its end, to the server's timeout, or until `abort`.
pub async fn exchange(
    server: &Server,
    clock: &Clock,
    outgoing: &Outgoing,
    abort: &CancellationToken,
) -> (Observed, Tail) {
    let mut seen = Observed::new(clock.now_ns(), outgoing.expected_events);
    let deadline = tokio::time::Instant::from_std(clock.instant(seen.sent_ns)) + server.request_timeout;
    let ended = tokio::select! {
        biased;
        () = abort.cancelled() => None,
        ended = tokio::time::timeout_at(deadline, follow(server, clock, outgoing, &mut seen)) => Some(ended),
    };
    let (end, tail) = match ended {
        None => return (seen, Tail(None)),
        Some(Err(_)) => {
            let text = format!("no end within {} s", server.request_timeout.as_secs_f64());
            (End { outcome: Outcome::Timeout, error: Some(text), at_ns: clock.now_ns() }, None)
        }
        Some(Ok((end, tail))) => (end, tail),
    };
    seen.completed_ns = Some(end.at_ns);
    seen.outcome = end.outcome;
    seen.error = end.error.map(|text| server.redact(&text).into_boxed_str());
    seen.gaps.shrink();
    (seen, Tail(tail))
}

struct End {
    outcome: Outcome,
    error: Option<String>,
    at_ns: i64,
}

async fn follow(
    server: &Server,
    clock: &Clock,
    outgoing: &Outgoing,
    seen: &mut Observed,
) -> (End, Option<reqwest::Response>) {
    let end = |outcome, error| End { outcome, error, at_ns: clock.now_ns() };
    let response = match send(server, outgoing, seen).await {
        Ok(response) => response,
        Err(error) => {
            let outcome = failure(&error, Stage::Head);
            return (end(outcome, Some(chain(&error.without_url()))), None);
        }
    };
    if !response.status().is_success() {
        let status = response.status().as_u16();
        let text = beginning(response).await;
        let text = error_text(&String::from_utf8_lossy(&text));
        let text = if text.is_empty() { format!("status {status} without a body") } else { text };
        return (end(Outcome::HttpStatus(status), Some(text)), None);
    }
    let result = read_answer(response, clock, outgoing, seen).await;
    match result {
        Ok(tail) if seen.is_empty() => {
            let text = "the answer has neither content nor output tokens".to_owned();
            (end(Outcome::Empty, Some(text)), tail)
        }
        Ok(tail) => (end(Outcome::Ok, None), tail),
        Err((outcome, text)) => (end(outcome, Some(text)), None),
    }
}

async fn send(
    server: &Server,
    outgoing: &Outgoing,
    seen: &mut Observed,
) -> Result<reqwest::Response, reqwest::Error> {
    let request = || {
        let mut request = reqwest::Request::new(reqwest::Method::POST, server.chat_url.clone());
        *request.headers_mut() = server.headers.clone();
        request.headers_mut().insert("x-session-id", outgoing.session_id.clone());
        *request.body_mut() = Some(outgoing.body.clone().into());
        request
    };
    let (result, connected) = connect::watch(server.client.execute(request())).await;
    seen.new_connection = connected;
    match result {
        // A server may close a kept connection at any time; its close and our request then cross. That is no
        // failure of the request, which nobody has read: it goes out once more, on a connection made for it. The client
        // does not tell a connection that broke within the head of an answer from one that broke before it.
        Err(error) if !connected && !error.is_connect() && failure(&error, Stage::Head) == Outcome::Reset => {
            seen.resent = true;
            let (result, connected) = connect::watch(server.fresh_client.execute(request())).await;
            seen.new_connection = connected;
            result
        }
        result => result,
    }
}

async fn beginning(mut response: reqwest::Response) -> Vec<u8> {
    let mut body = Vec::new();
    while body.len() < ERROR_BODY_BYTES {
        match response.chunk().await {
            Ok(Some(bytes)) => body.extend_from_slice(&bytes),
            _ => break,
        }
    }
    body
}

type Broken = (Outcome, String);

fn broken(error: reqwest::Error) -> Broken {
    (failure(&error, Stage::Body), chain(&error.without_url()))
}

/// What the beginning of a body shows it to be, whatever its headers say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Stream,
    /// JSON, although a stream was asked for.
    Whole,
    /// A page for people, such as a gateway's.
    Page,
}

const BOM: &[u8] = b"\xef\xbb\xbf";
/// Names that a line of an event stream can begin with; a comment has none.
const FIELDS: [&[u8]; 5] = [b":", b"data", b"event", b"id", b"retry"];

impl Form {
    /// Nothing while the beginning tells nothing yet.
    fn of(beginning: &[u8], says_json: bool) -> Option<Form> {
        let text = beginning.strip_prefix(BOM).unwrap_or(beginning).trim_ascii_start();
        if BOM.starts_with(beginning) || text.is_empty() {
            return None;
        }
        if says_json && FIELDS.iter().any(|name| name.len() > text.len() && name.starts_with(text)) {
            return None;
        }
        Some(match text[0] {
            b'{' => Form::Whole,
            _ if says_json && !FIELDS.iter().any(|name| text.starts_with(name)) => Form::Whole,
            b'<' => Form::Page,
            _ => Form::Stream,
        })
    }

    /// For a body that tells nothing.
    fn by_header(says_json: bool) -> Form {
        if says_json { Form::Whole } else { Form::Stream }
    }
}

/// Reads a body to its end, or to `[DONE]`; then gives what is left of it.
async fn read_answer(
    mut response: reqwest::Response,
    clock: &Clock,
    outgoing: &Outgoing,
    seen: &mut Observed,
) -> Result<Option<reqwest::Response>, Broken> {
    let says_json = response
        .headers()
        .get("content-type")
        .and_then(|v| v.to_str().ok())
        .is_some_and(|v| v.trim_start().starts_with("application/json"));
    let mut first = Bytes::new();
    let form = loop {
        if let Some(form) = Form::of(&first, says_json) {
            break form;
        }
        if first.len() > BEGINNING {
            break Form::by_header(says_json);
        }
        match response.chunk().await.map_err(broken)? {
            Some(bytes) if first.is_empty() => first = bytes,
            Some(bytes) => first = [first, bytes].concat().into(),
            None => break Form::by_header(says_json),
        }
    };
    let first_ns = clock.now_ns();
    match form {
        Form::Whole => read_whole(response, first, clock, outgoing, seen).await.map(|()| None),
        Form::Stream => read_stream(response, (first, first_ns), clock, outgoing, seen).await,
        Form::Page => {
            let text = format!("the answer is neither an event stream nor JSON: {}", beginning_of(&first));
            Err((Outcome::Decode, text))
        }
    }
}

fn beginning_of(data: &[u8]) -> String {
    String::from_utf8_lossy(&data[..data.len().min(320)]).chars().take(80).collect()
}

async fn read_stream(
    mut response: reqwest::Response,
    (mut bytes, mut now_ns): (Bytes, i64),
    clock: &Clock,
    outgoing: &Outgoing,
    seen: &mut Observed,
) -> Result<Option<reqwest::Response>, Broken> {
    let mut intake = Intake::new(outgoing.first_chunk_threshold);
    loop {
        intake.take(&bytes, now_ns, seen)?;
        if intake.is_done {
            return Ok(Some(response));
        }
        bytes = match response.chunk().await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return intake.end(seen).map(|()| None),
            // The answer was whole; how its connection ended does not matter.
            Err(_) if seen.finish_reason.is_some() => return Ok(None),
            Err(error) => return Err(broken(error)),
        };
        // Stamp before decoding, so that parsing is not counted as latency.
        now_ns = clock.now_ns();
    }
}

/// A stream on its way in: the bytes of each read → what is seen. No I/O.
#[derive(Debug)]
struct Intake {
    decoder: SseDecoder,
    first_chunk_threshold: u32,
    /// `[DONE]` was read; what follows it is nothing.
    is_done: bool,
}

impl Intake {
    fn new(first_chunk_threshold: u32) -> Self {
        Intake { decoder: SseDecoder::new(), first_chunk_threshold, is_done: false }
    }

    /// Takes the bytes of one read, which arrived at `now_ns`.
    fn take(&mut self, bytes: &[u8], now_ns: i64, seen: &mut Observed) -> Result<(), Broken> {
        let Intake { decoder, first_chunk_threshold, is_done } = self;
        let mut fault = None;
        let events_before = seen.events;
        let fed = decoder.feed(bytes, |data| {
            let data = data.trim_ascii();
            // Some gateways keep a connection alive with events that carry nothing.
            if fault.is_some() || *is_done || data.is_empty() {
                return;
            }
            if data == b"[DONE]" {
                *is_done = true;
            } else if let Err(error) = seen.take_event(data, now_ns, *first_chunk_threshold) {
                fault = Some(error);
            }
        });
        seen.reads += u32::from(seen.events > events_before);
        if let Some(fault) = fault {
            return Err(fault);
        }
        // What follows an answer that was whole does not matter.
        if *is_done { Ok(()) } else { fed.map_err(|e| (Outcome::Decode, e.to_string())) }
    }

    /// The body ended in order.
    fn end(&self, seen: &Observed) -> Result<(), Broken> {
        if self.is_done || seen.finish_reason.is_some() {
            return Ok(());
        }
        let text = "the stream ended with neither finish reason nor [DONE]".to_owned();
        Err((Outcome::Truncated, text))
    }
}

/// An answer that is no stream, although one was asked for: everything arrives with its last byte.
async fn read_whole(
    mut response: reqwest::Response,
    first: Bytes,
    clock: &Clock,
    outgoing: &Outgoing,
    seen: &mut Observed,
) -> Result<(), Broken> {
    seen.is_whole = true;
    let mut body = Vec::from(first);
    while let Some(bytes) = response.chunk().await.map_err(broken)? {
        body.extend_from_slice(&bytes);
        if body.len() > WHOLE_BODY_BYTES {
            return Err((Outcome::Decode, format!("the answer is longer than {WHOLE_BODY_BYTES} bytes")));
        }
    }
    seen.take_whole(&body, clock.now_ns(), outgoing.first_chunk_threshold)
}

impl Observed {
    /// Nothing yet.
    pub(crate) fn new(sent_ns: i64, expected_events: u32) -> Self {
        Observed {
            sent_ns,
            first_token_ns: None,
            first_answer_ns: None,
            first_chunk_ns: None,
            last_token_ns: None,
            completed_ns: None,
            events: 0,
            reads: 0,
            is_whole: false,
            gaps: Gaps::with_capacity(expected_events as usize),
            text: Text::default(),
            usage_steps: Vec::new(),
            usage: None,
            finish_reason: None,
            outcome: Outcome::Aborted,
            error: None,
            new_connection: false,
            resent: false,
        }
    }

    /// Neither content nor output tokens.
    fn is_empty(&self) -> bool {
        let has_tokens = self.usage.and_then(|u| u.completion_tokens).is_some_and(|n| n > 0);
        self.events == 0 && !has_tokens
    }

    /// Takes an answer that is no stream.
    fn take_whole(&mut self, body: &[u8], now_ns: i64, first_chunk_threshold: u32) -> Result<(), Broken> {
        let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
        self.take_event(body, now_ns, first_chunk_threshold)?;
        self.reads = self.events.min(1);
        Ok(())
    }

    /// Takes one event that arrived at `now_ns`.
    fn take_event(&mut self, data: &[u8], now_ns: i64, first_chunk_threshold: u32) -> Result<(), Broken> {
        // As in browsers, bytes that are no UTF-8 become replacement characters.
        let text = String::from_utf8_lossy(data);
        let chunk = Chunk::decode(&text).map_err(|e| {
            (Outcome::Decode, format!("an event is no completion chunk ({e}): {}", beginning_of(data)))
        })?;
        if let Some(error) = chunk.error {
            return Err((Outcome::StreamError, error));
        }
        if let Some(usage) = chunk.usage {
            self.usage = Some(usage.after(self.usage.unwrap_or_default()));
        }
        if let Some(reason) = chunk.finish_reason {
            self.finish_reason = Some(reason.into());
        }
        if chunk.pieces.is_empty() {
            return Ok(());
        }
        if self.first_answer_ns.is_none() && chunk.pieces.iter().any(|piece| piece.is_answer) {
            self.first_answer_ns = Some(now_ns);
        }
        for piece in &chunk.pieces {
            let into = if piece.is_answer { &mut self.text.answer } else { &mut self.text.other };
            into.push_str(&piece.text);
        }
        let length = |text: &str| u32::try_from(text.len()).unwrap_or(u32::MAX);
        self.text.ends.push((length(&self.text.answer), length(&self.text.other)));
        if let Some(tokens) = chunk.usage.and_then(|u| u.completion_tokens) {
            self.usage_steps.push(tokens);
        }
        self.events += 1;
        match self.last_token_ns {
            None => self.first_token_ns = Some(now_ns),
            Some(last_ns) => self.gaps.push(u64::try_from(now_ns - last_ns).unwrap_or(0)),
        }
        self.last_token_ns = Some(now_ns);
        if self.events == first_chunk_threshold {
            self.first_chunk_ns = Some(now_ns);
        }
        Ok(())
    }
}

/// How far a request had come when it failed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Head,
    Body,
}

/// The outcome that a client error stands for.
fn failure(error: &reqwest::Error, stage: Stage) -> Outcome {
    let mut is_tls = false;
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut broken = None;
    while let Some(error) = cause {
        is_tls |= error.is::<rustls::Error>();
        if let Some(error) = error.downcast_ref::<hyper::Error>() {
            if error.is_incomplete_message() {
                broken = Some(if stage == Stage::Head { Outcome::Reset } else { Outcome::Truncated });
            } else if error.is_parse() {
                broken = Some(Outcome::Decode);
            } else if error.is_canceled() || error.is_closed() {
                broken = Some(Outcome::Reset);
            }
        }
        if let Some(error) = error.downcast_ref::<std::io::Error>() {
            use std::io::ErrorKind as Kind;
            match error.kind() {
                Kind::ConnectionReset | Kind::ConnectionAborted | Kind::BrokenPipe | Kind::NotConnected => {
                    broken = Some(Outcome::Reset);
                }
                Kind::UnexpectedEof => {
                    broken = Some(if stage == Stage::Head { Outcome::Reset } else { Outcome::Truncated });
                }
                _ => {
                    // rustls wraps its errors into io errors, which do not give them as their source.
                    is_tls |= error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
                }
            }
        }
        cause = error.source();
    }
    if is_tls {
        Outcome::Tls
    } else if error.is_connect() {
        Outcome::Connect
    } else if error.is_timeout() {
        Outcome::Timeout
    } else {
        broken.unwrap_or(if error.is_decode() && stage == Stage::Body {
            Outcome::Decode
        } else {
            Outcome::Reset
        })
    }
}

#[cfg(test)]
mod tests;
