//! What a fault makes of an answer. Pure.
//!
//! A struck request's script is taken apart into the events that it would have sent, changed, and put together
//! again; the script of a request that is spared never comes here.

use std::fmt::Write as _;
use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use super::{Fault, Loss, Place};
use crate::http::{LAST_CHUNK, put_chunk, stream_head};
use crate::script::{Act, Script, Step};

/// Longest piece that `cut` makes, in bytes.
const CUT_MOST: usize = 9;
/// Length of one header of a flood, in bytes.
const FLOOD_HEADER: usize = 40;

/// Makes of a streamed answer's script what the fault wants; the head becomes its first step. `rng` is the
/// request's own.
pub(crate) fn change(
    fault: Fault,
    script: Script,
    start_ns: u64,
    early_role: bool,
    keep_alive: bool,
    rng: &mut ChaCha8Rng,
) -> Script {
    let mut stream = Stream::take_apart(script, start_ns, keep_alive && !fault.closes());
    if early_role {
        let roles = stream.events.iter_mut().filter(|event| event.kind == Kind::Role);
        roles.for_each(|event| event.due_ns = start_ns);
    }
    stream.strike(fault, rng);
    stream.put_together()
}

/// A JSON body whose content-length is off by `off` bytes, from one where it is right.
pub(crate) fn with_length_off(answer: &[u8], off: i64) -> Vec<u8> {
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n").map_or(answer.len(), |at| at + 4);
    let body = &answer[end..];
    let head = String::from_utf8_lossy(&answer[..end]);
    let right = format!("content-length: {}\r\n", body.len());
    let wrong = format!("content-length: {}\r\n", off_by(body.len(), off));
    [head.replace(&right, &wrong).as_bytes(), body].concat()
}

fn off_by(length: usize, off: i64) -> i64 {
    (i64::try_from(length).unwrap_or(i64::MAX) + off).max(0)
}

/// One event of a stream.
struct Event {
    due_ns: u64,
    tokens: u32,
    kind: Kind,
    /// With its blank line
    bytes: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Role,
    Content,
    Finish,
    Usage,
    Done,
}

/// How a body is delimited.
enum Framing {
    Chunked,
    /// Chunked, in pieces of a few bytes
    Cut(Box<ChaCha8Rng>),
    /// By a content-length that is off by so much
    Length(i64),
}

/// A streamed answer in its parts.
struct Stream {
    start_ns: u64,
    head: Vec<u8>,
    events: Vec<Event>,
    framing: Framing,
    /// Bytes instead of what comes after the events that are left
    rest: Option<Vec<u8>>,
    /// How it ends before its end, and when
    last: Option<(Act, u64)>,
    due_first_ns: u64,
    bytes_a_write: usize,
}

impl Stream {
    fn take_apart(mut script: Script, start_ns: u64, keep_alive: bool) -> Self {
        let mut events = Vec::new();
        let mut bytes = Vec::new();
        let due_first_ns = script.due_first_ns();
        for step in 0..script.steps.len() {
            let is_content = script.render(step, &mut bytes);
            let Step { due_ns, tokens, .. } = script.steps[step];
            events.extend(payloads(&bytes).into_iter().map(|bytes| Event {
                due_ns,
                tokens,
                kind: if is_content { Kind::Content } else { kind(&bytes) },
                bytes,
            }));
        }
        let head = stream_head(keep_alive);
        let framing = Framing::Chunked;
        Self {
            start_ns,
            head,
            events,
            framing,
            rest: None,
            last: None,
            due_first_ns,
            bytes_a_write: usize::MAX,
        }
    }

    fn strike(&mut self, fault: Fault, rng: &mut ChaCha8Rng) {
        match fault {
            Fault::Lost(loss, place) => self.lose(loss, place),
            Fault::End(events) => self.cut_after(events),
            Fault::Error(events) => {
                let error =
                    json!({"error": {"message": "a fault was asked for", "type": "Fault", "code": 500}});
                self.replace_rest(events, format!("data: {error}\n\ndata: [DONE]\n\n").as_bytes());
            }
            Fault::Garbage(events) => self.insert_after(events, b"data: {\"choices\": [oops\n\n".to_vec()),
            Fault::BadChunk(events) => {
                self.cut_after(events);
                self.rest = Some(b"zzz\r\n".to_vec());
            }
            Fault::Length(off) => self.framing = Framing::Length(off),
            Fault::Empty => {
                self.events.retain(|event| event.kind != Kind::Content);
                self.events.iter_mut().for_each(|event| event.tokens = 0);
                self.edit(|_, kind, value| match kind {
                    Kind::Finish => value["choices"][0]["finish_reason"] = json!("stop"),
                    Kind::Usage => value["usage"]["completion_tokens"] = json!(0),
                    _ => {}
                });
            }
            Fault::NoDone => self.events.retain(|event| event.kind != Kind::Done),
            Fault::NoFinish => self.edit(|_, kind, value| {
                if kind == Kind::Finish {
                    value["choices"][0]["finish_reason"] = Value::Null;
                }
            }),
            Fault::LateDone(ms) => {
                for event in self.events.iter_mut().filter(|event| event.kind == Kind::Done) {
                    event.due_ns += u64::from(ms) * 1_000_000;
                }
            }
            Fault::Reasoning(events) => self.edit(|at, kind, value| {
                if kind == Kind::Content && at < events {
                    let delta = &mut value["choices"][0]["delta"];
                    *delta = json!({"reasoning_content": delta["content"]});
                }
            }),
            Fault::Tools => self.edit(|at, kind, value| {
                if kind == Kind::Content {
                    let delta = &mut value["choices"][0]["delta"];
                    let mut call = json!({"index": 0, "function": {"arguments": delta["content"]}});
                    if at == 0 {
                        call["id"] = json!("call_0");
                        call["type"] = json!("function");
                        call["function"]["name"] = json!("f");
                    }
                    *delta = json!({"tool_calls": [call]});
                }
            }),
            Fault::Cut => self.framing = Framing::Cut(Box::new(rng.clone())),
            Fault::Drip => self.bytes_a_write = 1,
            Fault::LineEnd(end) => self.rewrite(|_, text| text.replace('\n', end)),
            Fault::Fields => self.rewrite(|at, text| {
                let mark = if at == 0 { "\u{feff}" } else { "" };
                let text = text.replacen(",\"object\"", ",\ndata: \"object\"", 1);
                format!("{mark}: keep-alive\n\nevent: message\nid: {at}\nretry: 1000\ndatabase: x\n{text}")
            }),
            Fault::Gzip => self.compress(),
            Fault::Burst => {
                let last_ns = self.events.iter().map(|event| event.due_ns).max().unwrap_or(self.start_ns);
                self.events.iter_mut().for_each(|event| event.due_ns = last_ns);
                self.due_first_ns = last_ns;
            }
            Fault::Huge(mb) => self.edit(|at, kind, value| {
                if kind == Kind::Content && at == 0 {
                    value["padding"] = json!("x".repeat(mb as usize * 1_000_000));
                }
            }),
            Fault::HeaderFlood(count) => {
                let filling = "x".repeat(FLOOD_HEADER);
                let flood = (0..count).fold(String::new(), |mut all, n| {
                    let _ = write!(all, "x-flood-{n}: {filling}\r\n");
                    all
                });
                self.in_head(&flood);
            }
            // Made elsewhere: instead of a script, of another script, or by the frame.
            Fault::Status(..) | Fault::Json(_) | Fault::UsageEach => {}
        }
    }

    fn lose(&mut self, loss: Loss, place: Place) {
        let due_ns = match place {
            Place::BeforeHead => {
                self.head.clear();
                self.events.clear();
                self.due_first_ns
            }
            Place::InHead => {
                self.head.truncate(self.head.len() / 2);
                self.events.clear();
                self.due_first_ns
            }
            Place::Events(events) => {
                self.cut_after(events);
                self.events.last().map_or(self.due_first_ns, |event| event.due_ns)
            }
        };
        let act = match loss {
            Loss::Reset => Act::Reset,
            Loss::Close => Act::Bytes(Vec::new()),
            Loss::HalfClose => Act::HalfClose,
            Loss::Hang => Act::Hang,
        };
        self.last = Some((act, due_ns));
    }

    /// Index just behind so many content events.
    fn behind(&self, events: u32) -> usize {
        let contents = self.events.iter().enumerate().filter(|(_, event)| event.kind == Kind::Content);
        let last = contents.take(events as usize).last().map(|(at, _)| at + 1);
        // With none, the role still goes out.
        last.unwrap_or_else(|| usize::from(self.events.first().is_some_and(|event| event.kind == Kind::Role)))
    }

    fn cut_after(&mut self, events: u32) {
        self.events.truncate(self.behind(events));
    }

    fn replace_rest(&mut self, events: u32, bytes: &[u8]) {
        self.cut_after(events);
        let (due_ns, tokens) = self.events.last().map_or((self.due_first_ns, 0), |e| (e.due_ns, e.tokens));
        self.events.push(Event { due_ns, tokens, kind: Kind::Done, bytes: bytes.to_vec() });
    }

    fn insert_after(&mut self, events: u32, bytes: Vec<u8>) {
        let at = self.behind(events);
        let (due_ns, tokens) = match at.checked_sub(1) {
            Some(before) => (self.events[before].due_ns, self.events[before].tokens),
            None => (self.due_first_ns, 0),
        };
        self.events.insert(at, Event { due_ns, tokens, kind: Kind::Usage, bytes });
    }

    /// Changes the JSON of each event; gets its number among those of its kind.
    fn edit(&mut self, mut change: impl FnMut(u32, Kind, &mut Value)) {
        let mut contents = 0;
        for event in &mut self.events {
            let text = String::from_utf8_lossy(&event.bytes);
            let Some(Ok(mut value)) = text.strip_prefix("data: ").map(serde_json::from_str::<Value>) else {
                continue;
            };
            change(contents, event.kind, &mut value);
            contents += u32::from(event.kind == Kind::Content);
            event.bytes = format!("data: {value}\n\n").into_bytes();
        }
    }

    /// Changes the text of each event.
    fn rewrite(&mut self, change: impl Fn(usize, &str) -> String) {
        for (at, event) in self.events.iter_mut().enumerate() {
            event.bytes = change(at, &String::from_utf8_lossy(&event.bytes)).into_bytes();
        }
    }

    fn compress(&mut self) {
        self.in_head("content-encoding: gzip\r\n");
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        for event in &mut self.events {
            // The sink is a Vec, which takes all.
            let _ = gzip.write_all(&event.bytes).and_then(|()| gzip.flush());
            event.bytes = std::mem::take(gzip.get_mut());
        }
        if let (Some(last), Ok(end)) = (self.events.last_mut(), gzip.finish()) {
            last.bytes.extend(end);
        }
    }

    /// Adds lines to the head.
    fn in_head(&mut self, lines: &str) {
        self.head.truncate(self.head.len().saturating_sub(2));
        self.head.extend_from_slice(lines.as_bytes());
        self.head.extend_from_slice(b"\r\n");
    }

    fn put_together(mut self) -> Script {
        let body: usize = self.events.iter().map(|event| event.bytes.len()).sum();
        if let Framing::Length(off) = self.framing {
            let head = String::from_utf8_lossy(&self.head);
            let length = format!("content-length: {}", off_by(body, off));
            self.head = head.replace("transfer-encoding: chunked", &length).into_bytes();
        }
        let mut steps = vec![Step { due_ns: self.start_ns, tokens: 0, act: Act::Bytes(self.head) }];
        let mut tokens = 0;
        let mut due_ns = self.due_first_ns;
        for event in self.events {
            let mut bytes = Vec::with_capacity(event.bytes.len() + 16);
            match &mut self.framing {
                Framing::Chunked => put_chunk(&mut bytes, &event.bytes),
                Framing::Length(_) => bytes.extend_from_slice(&event.bytes),
                Framing::Cut(rng) => {
                    let mut rest = event.bytes.as_slice();
                    while !rest.is_empty() {
                        let (piece, after) = rest.split_at(rng.random_range(1..=CUT_MOST).min(rest.len()));
                        put_chunk(&mut bytes, piece);
                        rest = after;
                    }
                }
            }
            (tokens, due_ns) = (event.tokens, event.due_ns);
            let act = if event.kind == Kind::Content { Act::Event(bytes) } else { Act::Bytes(bytes) };
            steps.push(Step { due_ns, tokens, act });
        }
        let (act, due_ns) = match (self.last, self.rest) {
            (Some(last), _) => last,
            (None, Some(rest)) => (Act::Bytes(rest), due_ns),
            (None, None) if matches!(self.framing, Framing::Length(_)) => (Act::Bytes(Vec::new()), due_ns),
            (None, None) => (Act::Bytes(LAST_CHUNK.to_vec()), due_ns),
        };
        steps.push(Step { due_ns, tokens, act });
        Script::of(steps, self.bytes_a_write, self.due_first_ns)
    }
}

/// What the chunks of a chunked body carry, which we wrote ourselves.
fn payloads(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let mut rest = bytes;
    while let Ok(httparse::Status::Complete((start, size @ 1..))) = httparse::parse_chunk_size(rest) {
        let end = start + usize::try_from(size).expect("we wrote it");
        all.push(rest[start..end].to_vec());
        rest = &rest[end + 2..];
    }
    all
}

fn kind(event: &[u8]) -> Kind {
    let text = String::from_utf8_lossy(event);
    let data = text.trim_end().strip_prefix("data: ").unwrap_or_default();
    let Ok(value) = serde_json::from_str::<Value>(data) else { return Kind::Done };
    if value["choices"].as_array().is_some_and(Vec::is_empty) {
        Kind::Usage
    } else if value["choices"][0]["finish_reason"].is_null() {
        Kind::Role
    } else {
        Kind::Finish
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;
    use crate::api::Api;
    use crate::replies::{Reply, rng};
    use crate::script::Frame;

    fn script() -> Script {
        let frame = Frame {
            api: Api::Chat,
            id: "id-1".into(),
            created_s: 1,
            model: "sim".into(),
            prompt_tokens: 10,
            cached_tokens: None,
            usage_at_end: true,
            usage_in_each: false,
            keep_alive: true,
        };
        let reply = Reply { ids: vec![0; 3], text: "abc".into(), ends: vec![1, 2, 3], early: false };
        Script::streamed(&frame, reply, &[100, 200, 300], 1, false)
    }

    /// Head, body without its chunked coding, and the last step.
    fn play(name: &str) -> (String, Vec<u8>, Step) {
        let fault = Fault::parse(name).unwrap();
        let mut script = change(fault, script(), 50, name == "hang:0", true, &mut rng(1, "test", &[0; 32]));
        let mut out = Vec::new();
        let mut all = Vec::new();
        for step in 0..script.steps.len() {
            script.render(step, &mut out);
            all.extend_from_slice(&out);
        }
        assert!(script.steps.is_sorted_by_key(|step| step.due_ns), "{name}");
        assert!(script.steps.is_sorted_by_key(|step| step.tokens), "{name}");
        let end = all.windows(4).position(|w| w == b"\r\n\r\n").map_or(all.len(), |at| at + 4);
        let head = String::from_utf8(all[..end].to_vec()).unwrap();
        let body =
            if head.contains("chunked") { payloads(&all[end..]).concat() } else { all[end..].to_vec() };
        (head, body, script.steps.pop().unwrap())
    }

    fn text(name: &str) -> String {
        String::from_utf8(play(name).1).unwrap()
    }

    const DONE: &str = "data: [DONE]\n\n";

    #[test]
    fn a_loss_comes_where_it_was_asked_for() {
        for (name, events, due_ns) in [("reset:0", 0, 100), ("reset:2", 2, 200), ("reset:9", 3, 300)] {
            let (head, body, last) = play(name);
            assert!(head.ends_with("\r\n\r\n"));
            let contents = String::from_utf8(body).unwrap().matches(r#""content":""#).count();
            assert_eq!(contents, 1 + events as usize, "the role too");
            assert_eq!(last, Step { due_ns, tokens: events, act: Act::Reset });
        }
        assert_eq!(play("hang").0, "");
        let (_, body, last) = play("hang:0");
        assert!(!body.is_empty(), "the role has come");
        assert_eq!(last, Step { due_ns: 50, tokens: 0, act: Act::Hang });
        let (head, body, last) = play("half-close:in-head");
        assert!(head.starts_with("HTTP/1.1 200") && !head.contains("\r\n\r\n") && body.is_empty());
        assert_eq!(last, Step { due_ns: 100, tokens: 0, act: Act::HalfClose });
    }

    #[test]
    fn a_stream_keeps_its_meaning_in_every_other_form() {
        let plain = text("burst");
        assert!(plain.ends_with(DONE));
        for name in ["cut", "drip", "length", "late-done"] {
            assert_eq!(text(name), plain, "{name}");
        }
        assert_eq!(text("huge:1").len(), plain.len() + r#","padding":"""#.len() + 1_000_000);
        assert_eq!(text("crlf").replace("\r\n", "\n"), plain);
        assert_eq!(text("cr").replace('\r', "\n"), plain);
        assert!(text("fields").starts_with("\u{feff}: keep-alive\n\nevent: message\nid: 0\n"));
        let mut unpacked = String::new();
        flate2::read::GzDecoder::new(play("gzip").1.as_slice()).read_to_string(&mut unpacked).unwrap();
        assert_eq!(unpacked, plain);
    }

    #[test]
    fn each_part_can_be_missing_or_wrong() {
        let finish = r#""finish_reason":"length""#;
        assert!(text("no-done").contains(finish) && !text("no-done").contains(DONE));
        assert!(!text("no-finish").contains(finish) && text("no-finish").ends_with(DONE));
        assert!(text("empty").contains(r#""completion_tokens":0"#));
        assert!(!text("end:3").contains("usage"));
        assert_eq!(text("error:1").matches(r#""error""#).count(), 1);
        assert!(text("garbage:3").find("oops") > text("garbage:3").find(r#""content":"c""#));
        assert_eq!(text("reasoning:2").matches("reasoning_content").count(), 2);
        assert_eq!(text("tools").matches(r#""arguments":"#).count(), 3);
    }

    #[test]
    fn a_content_length_is_off_by_what_was_asked_for() {
        for (name, off) in [("length", 0), ("length:-40", -40), ("length:7", 7)] {
            let (head, body, _) = play(name);
            assert!(head.contains(&format!("content-length: {}\r\n", off_by(body.len(), off))), "{head}");
        }
        let right = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
        assert_eq!(with_length_off(right, -1), b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{}");
    }

    #[test]
    fn a_flood_has_as_many_headers_as_were_asked_for() {
        assert_eq!(play("header-flood:300").0.matches("x-flood-").count(), 300);
    }
}
