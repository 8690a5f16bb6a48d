//! What is written and when: a reply becomes a list of timed steps. Pure.
//!
//! The pacer plays a script step by step and knows nothing of APIs; whatever else may happen to a connection
//! at a given instant becomes a step of another kind, put into the list here.

use std::ops::Range;

use serde_json::json;

use crate::api::Api;
use crate::http::{LAST_CHUNK, Response, put_chunk};
use crate::replies::Reply;

/// Something to do at an instant.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// In ns of CLOCK_MONOTONIC
    pub(crate) due_ns: u64,
    /// Tokens generated once this is done
    pub(crate) tokens: u32,
    pub(crate) act: Act,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// Write a content event with this part of the text
    Content(Range<usize>),
    /// Write a content event whose bytes are known, or a whole answer, which is one
    Event(Vec<u8>),
    /// Write bytes that are no content
    Bytes(Vec<u8>),
    /// Have the connection reset when it is closed
    Reset,
    /// Send the end of our direction, and wait for the client to close
    HalfClose,
    /// Wait for the client to close
    Hang,
}

impl Act {
    /// Whether it writes what the model produced.
    pub(crate) fn is_content(&self) -> bool {
        matches!(self, Self::Content(_) | Self::Event(_))
    }
}

/// A reply on its way: steps, and what they need to be rendered.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) steps: Vec<Step>,
    /// Most bytes that one write takes
    pub(crate) bytes_a_write: usize,
    chunks: Chunks,
    text: String,
    due_first_ns: u64,
}

/// What the chunks of one answer have in common.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    pub(crate) api: Api,
    pub(crate) id: String,
    pub(crate) created_s: u64,
    pub(crate) model: String,
    pub(crate) prompt_tokens: u32,
    /// Nothing when they are not to be told
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) usage_at_end: bool,
    pub(crate) usage_in_each: bool,
    pub(crate) keep_alive: bool,
}

impl Frame {
    fn usage(&self, completion_tokens: u32) -> String {
        let prompt_tokens = self.prompt_tokens;
        let total_tokens = prompt_tokens + completion_tokens;
        let details = match self.cached_tokens {
            Some(cached) => format!(r#","prompt_tokens_details":{{"cached_tokens":{cached}}}"#),
            None => String::new(),
        };
        format!(
            r#"{{"prompt_tokens":{prompt_tokens},"total_tokens":{total_tokens},"completion_tokens":{completion_tokens}{details}}}"#
        )
    }

    /// An event up to its choices.
    fn open(&self) -> String {
        let object = match self.api {
            Api::Chat => "chat.completion.chunk",
            Api::Completions => "text_completion",
        };
        let Self { id, created_s, model, .. } = self;
        format!(
            r#"data: {{"id":"{id}","object":"{object}","created":{created_s},"model":{},"choices":["#,
            json!(model)
        )
    }

    /// A choice, with its text (a JSON string) cut out.
    fn choice(&self, role: bool, finish: Option<&str>) -> (String, String) {
        let (open, close) = match self.api {
            Api::Chat if role => (r#""delta":{"role":"assistant","content":"#, "}"),
            Api::Chat => (r#""delta":{"content":"#, "}"),
            Api::Completions => (r#""text":"#, ""),
        };
        let after = format!(r#"{close},"logprobs":null,"finish_reason":{}}}"#, json!(finish));
        (format!(r#"{{"index":0,{open}"#), after)
    }

    fn event(&self, choice: &str, usage: Option<u32>) -> Vec<u8> {
        let usage = usage.map(|tokens| format!(r#","usage":{}"#, self.usage(tokens))).unwrap_or_default();
        let mut out = Vec::new();
        put_chunk(&mut out, format!("{}{choice}]{usage}}}\n\n", self.open()).as_bytes());
        out
    }

    /// The role-only chunk; the completions API has none.
    pub(crate) fn role(&self) -> Option<Vec<u8>> {
        let (before, after) = self.choice(true, None);
        let usage = self.usage_in_each.then_some(0);
        (self.api == Api::Chat).then(|| self.event(&format!(r#"{before}""{after}"#), usage))
    }

    /// Finish reason, usage, `[DONE]`, and the end of the body.
    fn tail(&self, finish: &str, tokens: u32) -> Vec<u8> {
        let (before, after) = self.choice(false, Some(finish));
        let mut out = self.event(&format!(r#"{before}""{after}"#), self.usage_in_each.then_some(tokens));
        if self.usage_at_end {
            out.extend(self.event("", Some(tokens)));
        }
        put_chunk(&mut out, b"data: [DONE]\n\n");
        out.extend_from_slice(LAST_CHUNK);
        out
    }
}

fn finish_reason(reply: &Reply) -> &'static str {
    if reply.early { "stop" } else { "length" }
}

impl Script {
    /// A streamed answer. `dues_ns` has each token's instant; `role_is_sent` when the role chunk went
    /// out with the head.
    pub(crate) fn streamed(
        frame: &Frame,
        reply: Reply,
        dues_ns: &[u64],
        per_event: usize,
        role_is_sent: bool,
    ) -> Self {
        let mut steps = Vec::with_capacity(reply.ids.len() / per_event + 3);
        let mut role = if role_is_sent { None } else { frame.role() };
        let mut start = 0;
        let mut tokens = 0;
        let mut due_ns = 0;
        for (ends, dues) in reply.ends.chunks(per_event).zip(dues_ns.chunks(per_event)) {
            tokens += u32::try_from(ends.len()).expect("at most tokens_per_event");
            due_ns = dues[0];
            let end = ends[ends.len() - 1];
            // Held-back UTF-8: the tokens count, but there is nothing to show yet.
            if end > start {
                if let Some(role) = role.take() {
                    steps.push(Step { due_ns, tokens: 0, act: Act::Bytes(role) });
                }
                steps.push(Step { due_ns, tokens, act: Act::Content(start..end) });
                start = end;
            }
        }
        let mut tail = role.unwrap_or_default();
        tail.extend(frame.tail(finish_reason(&reply), tokens));
        steps.push(Step { due_ns, tokens, act: Act::Bytes(tail) });
        Self::new(steps, Chunks::new(frame), reply.text)
    }

    /// An answer in one piece, due with its last token.
    pub(crate) fn whole(frame: &Frame, reply: &Reply, dues_ns: &[u64]) -> Self {
        let tokens = u32::try_from(reply.ids.len()).expect("max_tokens is a u32");
        let finish = finish_reason(reply);
        let mut body = match frame.api {
            Api::Chat => json!({"object": "chat.completion", "choices": [{
                "index": 0, "message": {"role": "assistant", "content": reply.text},
                "logprobs": null, "finish_reason": finish,
            }]}),
            Api::Completions => json!({"object": "text_completion", "choices": [{
                "index": 0, "text": reply.text, "logprobs": null, "finish_reason": finish,
            }]}),
        };
        body["id"] = json!(frame.id);
        body["created"] = json!(frame.created_s);
        body["model"] = json!(frame.model);
        if frame.usage_at_end {
            body["usage"] = serde_json::from_str(&frame.usage(tokens)).expect("written just now");
        }
        let answer = Response::json(200, &body).render(frame.keep_alive, false);
        let due_ns = dues_ns.last().copied().unwrap_or(0);
        let steps = vec![Step { due_ns, tokens, act: Act::Event(answer) }];
        Self::new(steps, Chunks::new(frame), String::new())
    }

    /// Steps with no part of the text in them.
    pub(crate) fn of(steps: Vec<Step>, bytes_a_write: usize, due_first_ns: u64) -> Self {
        Self { steps, bytes_a_write, chunks: Chunks::default(), text: String::new(), due_first_ns }
    }

    fn new(steps: Vec<Step>, chunks: Chunks, text: String) -> Self {
        let content = steps.iter().find(|step| step.act.is_content());
        let due_first_ns = content.or(steps.last()).map_or(0, |step| step.due_ns);
        Self { steps, bytes_a_write: usize::MAX, chunks, text, due_first_ns }
    }

    /// When the first content is due; the last token's instant if there is none.
    pub(crate) fn due_first_ns(&self) -> u64 {
        self.due_first_ns
    }

    /// Moves every instant to where `moved` says; it must keep their order.
    pub(crate) fn move_dues(&mut self, moved: impl Fn(u64) -> u64) {
        self.steps.iter_mut().for_each(|step| step.due_ns = moved(step.due_ns));
        self.due_first_ns = moved(self.due_first_ns);
    }

    /// Puts the bytes of `step` into `out`, and says whether they are content.
    pub(crate) fn render(&mut self, step: usize, out: &mut Vec<u8>) -> bool {
        out.clear();
        match &self.steps[step].act {
            Act::Content(range) => {
                self.chunks.content(out, &self.text[range.clone()], self.steps[step].tokens);
                true
            }
            Act::Event(bytes) => {
                out.extend_from_slice(bytes);
                true
            }
            Act::Bytes(bytes) => {
                out.extend_from_slice(bytes);
                false
            }
            Act::Reset | Act::HalfClose | Act::Hang => false,
        }
    }
}

/// The constant parts of a content event: all but the text and, in continuous usage, the counts.
#[derive(Debug, Default)]
struct Chunks {
    before: String,
    after: String,
    usage: Option<Frame>,
    /// Where an event is put together, to learn its length before the chunk's size is written.
    event: Vec<u8>,
}

impl Chunks {
    fn new(frame: &Frame) -> Self {
        let (before, after) = frame.choice(false, None);
        Self {
            before: frame.open() + &before,
            after: after + "]",
            usage: frame.usage_in_each.then(|| frame.clone()),
            event: Vec::new(),
        }
    }

    fn content(&mut self, out: &mut Vec<u8>, text: &str, tokens: u32) {
        let event = &mut self.event;
        event.clear();
        event.extend_from_slice(self.before.as_bytes());
        serde_json::to_writer(&mut *event, text).expect("a string is always JSON, and a Vec takes all");
        event.extend_from_slice(self.after.as_bytes());
        if let Some(frame) = &self.usage {
            event.extend_from_slice(br#","usage":"#);
            event.extend_from_slice(frame.usage(tokens).as_bytes());
        }
        event.extend_from_slice(b"}\n\n");
        put_chunk(out, event);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn frame(api: Api) -> Frame {
        Frame {
            api,
            id: "id-1".into(),
            created_s: 1,
            model: "si\"m".into(),
            prompt_tokens: 10,
            cached_tokens: Some(4),
            usage_at_end: true,
            usage_in_each: false,
            keep_alive: true,
        }
    }

    fn reply(pieces: &[&str]) -> Reply {
        let mut text = String::new();
        let mut ends = Vec::new();
        for piece in pieces {
            text.push_str(piece);
            ends.push(text.len());
        }
        Reply { ids: vec![0; pieces.len()], text, ends, early: false }
    }

    fn dues(n: u64) -> Vec<u64> {
        (1..=n).map(|k| k * 100).collect()
    }

    /// Every step's due, kind and events; the chunked coding is undone and the JSON read.
    fn play(mut script: Script) -> Vec<(u64, bool, Vec<Value>)> {
        let mut out = Vec::new();
        (0..script.steps.len())
            .map(|n| {
                let is_content = script.render(n, &mut out);
                let mut events = Vec::new();
                let mut rest = out.as_slice();
                while !rest.is_empty() {
                    let line = rest.iter().position(|b| *b == b'\r').unwrap();
                    let size =
                        usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
                    let body = std::str::from_utf8(&rest[line + 2..line + 2 + size]).unwrap();
                    assert_eq!(&rest[line + 2 + size..line + 4 + size], b"\r\n");
                    rest = &rest[line + 4 + size..];
                    let Some(data) = body.strip_prefix("data: ") else {
                        assert_eq!(body, "");
                        continue;
                    };
                    let data = data.strip_suffix("\n\n").unwrap();
                    events.push(if data == "[DONE]" {
                        json!(data)
                    } else {
                        serde_json::from_str(data).unwrap()
                    });
                }
                (script.steps[n].due_ns, is_content, events)
            })
            .collect()
    }

    #[test]
    fn a_chat_stream_is_role_contents_finish_usage_done() {
        let script = Script::streamed(&frame(Api::Chat), reply(&["a", " \"b\n"]), &dues(2), 1, false);
        assert_eq!(script.due_first_ns(), 100);
        let steps = play(script);
        let shape: Vec<_> =
            steps.iter().map(|(due, is_content, events)| (*due, *is_content, events.len())).collect();
        assert_eq!(shape, [(100, false, 1), (100, true, 1), (200, true, 1), (200, false, 3)]);
        let delta = |step: usize| &steps[step].2[0]["choices"][0]["delta"];
        assert_eq!(delta(0), &json!({"role": "assistant", "content": ""}));
        assert_eq!(delta(1), &json!({"content": "a"}));
        assert_eq!(delta(2), &json!({"content": " \"b\n"}));
        assert_eq!(steps[1].2[0]["model"], "si\"m");
        assert_eq!(steps[1].2[0]["choices"][0]["finish_reason"], Value::Null);
        let [finish, usage, done] = steps[3].2.as_slice() else { panic!() };
        assert_eq!(finish["choices"][0]["finish_reason"], "length");
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(
            usage["usage"],
            json!({"prompt_tokens": 10, "total_tokens": 12, "completion_tokens": 2,
                   "prompt_tokens_details": {"cached_tokens": 4}})
        );
        assert_eq!(done, "[DONE]");
    }

    #[test]
    fn events_carry_several_tokens_and_are_due_with_their_first() {
        let script =
            Script::streamed(&frame(Api::Chat), reply(&["a", "b", "c", "d", "e"]), &dues(5), 2, true);
        let steps = play(script);
        let texts: Vec<_> = steps[..3]
            .iter()
            .map(|(due, _, e)| (*due, e[0]["choices"][0]["delta"]["content"].clone()))
            .collect();
        assert_eq!(texts, [(100, json!("ab")), (300, json!("cd")), (500, json!("e"))]);
        assert_eq!(steps[3].2[1]["usage"]["completion_tokens"], 5);
    }

    #[test]
    fn tokens_without_text_make_no_event_but_count() {
        let frame = Frame { usage_in_each: true, ..frame(Api::Chat) };
        let steps = play(Script::streamed(&frame, reply(&["", "\u{2603}", ""]), &dues(3), 1, false));
        assert_eq!(steps.len(), 3, "role, one content, tail");
        assert_eq!((steps[0].0, steps[2].0), (200, 300));
        assert_eq!(steps[0].2[0]["usage"]["completion_tokens"], 0);
        assert_eq!(steps[1].2[0]["usage"]["completion_tokens"], 2);
        assert_eq!(steps[2].2[0]["usage"]["completion_tokens"], 3);
        let nothing = play(Script::streamed(&frame, reply(&["", ""]), &dues(2), 1, false));
        assert_eq!(nothing.len(), 1);
        assert_eq!(nothing[0].2[0]["choices"][0]["delta"]["role"], "assistant");
    }

    #[test]
    fn a_completion_has_text_and_no_role() {
        let frame = Frame { cached_tokens: None, usage_at_end: false, ..frame(Api::Completions) };
        let steps = play(Script::streamed(&frame, reply(&["a"]), &dues(1), 1, false));
        assert_eq!(steps[0].2[0]["choices"][0]["text"], "a");
        assert_eq!(steps[1].2.len(), 2, "finish and done");
    }

    #[test]
    fn a_whole_answer_is_due_with_its_last_token() {
        let early = Reply { early: true, ..reply(&["a", "b"]) };
        let mut script = Script::whole(&frame(Api::Chat), &early, &dues(2));
        assert_eq!(script.due_first_ns(), 200);
        let mut out = Vec::new();
        assert!(script.render(0, &mut out));
        let text = String::from_utf8(out).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())));
        let body: Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["choices"][0]["message"]["content"], "ab");
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        assert_eq!(body["usage"]["completion_tokens"], 2);
    }
}
