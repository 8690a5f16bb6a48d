//! The JSON of one event of a completion stream (or of a whole answer) → what it says: text that the model
//! produced, usage, finish reason, error. Borrows from the event; knows nothing of time.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// What one event said.
#[derive(Debug, Default)]
pub struct Chunk<'a> {
    /// Pieces of text that the model produced, in order; an event with none is not a content event.
    pub pieces: Vec<Piece<'a>>,
    /// Token counts, when the event had them.
    pub usage: Option<Usage>,
    /// Why the model stopped, when the event said so.
    pub finish_reason: Option<Cow<'a, str>>,
    /// The `error` object inside a stream that began well.
    pub error: Option<String>,
}

/// A piece of output; never empty.
#[derive(Debug, PartialEq)]
pub struct Piece<'a> {
    /// The text.
    pub text: Cow<'a, str>,
    /// Whether it is part of the answer that later turns carry as history; reasoning and tool calls are not.
    pub is_answer: bool,
}

/// Token counts of a request, by the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: Option<u32>,
    /// Output tokens.
    pub completion_tokens: Option<u32>,
    /// Of these, tokens of reasoning.
    pub reasoning_tokens: Option<u32>,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: Option<u32>,
}

impl Usage {
    /// What a later event told, and what only an earlier one did.
    pub fn after(self, earlier: Usage) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens.or(earlier.prompt_tokens),
            completion_tokens: self.completion_tokens.or(earlier.completion_tokens),
            reasoning_tokens: self.reasoning_tokens.or(earlier.reasoning_tokens),
            cached_tokens: self.cached_tokens.or(earlier.cached_tokens),
        }
    }
}

// serde borrows a `Cow` only as a direct field, not inside an `Option`.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
struct WireChunk<'a> {
    #[serde(borrow, default)]
    choices: Option<Vec<WireChoice<'a>>>,
    #[serde(default)]
    usage: Option<WireUsage>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct WireChoice<'a> {
    #[serde(borrow, default)]
    delta: Option<WireDelta<'a>>,
    #[serde(borrow, default)]
    message: Option<WireDelta<'a>>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(borrow, default)]
    finish_reason: Option<Text<'a>>,
}

#[derive(Deserialize)]
struct WireDelta<'a> {
    #[serde(borrow, default)]
    reasoning_content: Option<Text<'a>>,
    #[serde(borrow, default)]
    reasoning: Option<Text<'a>>,
    #[serde(borrow, default)]
    content: Option<Text<'a>>,
    #[serde(borrow, default)]
    refusal: Option<Text<'a>>,
    #[serde(borrow, default)]
    tool_calls: Option<Vec<WireToolCall<'a>>>,
}

#[derive(Deserialize)]
struct WireToolCall<'a> {
    #[serde(borrow, default)]
    function: Option<WireFunction<'a>>,
}

#[derive(Deserialize)]
struct WireFunction<'a> {
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(borrow, default)]
    arguments: Option<Text<'a>>,
}

#[derive(Deserialize)]
struct WireUsage {
    #[serde(default, deserialize_with = "count")]
    prompt_tokens: Option<u32>,
    #[serde(default, deserialize_with = "count")]
    completion_tokens: Option<u32>,
    #[serde(default)]
    prompt_tokens_details: Option<WireDetails>,
    #[serde(default)]
    completion_tokens_details: Option<WireDetails>,
}

#[derive(Deserialize)]
struct WireDetails {
    #[serde(default, deserialize_with = "count")]
    cached_tokens: Option<u32>,
    #[serde(default, deserialize_with = "count")]
    reasoning_tokens: Option<u32>,
}

/// A count, however it is written; what is none is taken for absent, so that an odd usage does not fail a whole answer.
fn count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    let whole = |x: f64| (x.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&x)).then_some(x);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // whole, and within its bounds
    Ok(value.as_f64().and_then(whole).map(|x| x as u32))
}

impl<'a> Chunk<'a> {
    /// Decodes an event's data, or the body of an answer that is no stream.
    pub fn decode(json: &'a str) -> Result<Self, serde_json::Error> {
        let wire: WireChunk<'a> = serde_json::from_str(json)?;
        let mut chunk = Chunk {
            usage: wire.usage.map(|u| Usage {
                prompt_tokens: u.prompt_tokens,
                completion_tokens: u.completion_tokens,
                reasoning_tokens: u.completion_tokens_details.and_then(|d| d.reasoning_tokens),
                cached_tokens: u.prompt_tokens_details.and_then(|d| d.cached_tokens),
            }),
            error: wire.error.map(|e| error_text(e.get())),
            ..Chunk::default()
        };
        for choice in wire.choices.into_iter().flatten() {
            if let Some(delta) = choice.delta.or(choice.message) {
                // Some servers send the same text under both names.
                let reasoning = delta.reasoning_content.filter(|text| !text.0.is_empty());
                chunk.take(reasoning.or(delta.reasoning), false);
                chunk.take(delta.content, true);
                chunk.take(delta.refusal, true);
                for function in delta.tool_calls.into_iter().flatten().filter_map(|call| call.function) {
                    chunk.take(function.name, false);
                    chunk.take(function.arguments, false);
                }
            }
            chunk.take(choice.text, true);
            // Some servers write an empty one where others write null.
            if let Some(Text(reason)) = choice.finish_reason
                && !reason.is_empty()
            {
                chunk.finish_reason = Some(reason);
            }
        }
        Ok(chunk)
    }

    fn take(&mut self, text: Option<Text<'a>>, is_answer: bool) {
        if let Some(Text(text)) = text
            && !text.is_empty()
        {
            self.pieces.push(Piece { text, is_answer });
        }
    }
}

/// The message of an error object or string, else the JSON itself; empty for a null.
pub fn error_text(json: &str) -> String {
    let Ok(value) = serde_json::from_str::<serde_json::Value>(json) else { return json.to_owned() };
    for candidate in
        [&value["error"]["message"], &value["message"], &value["error"], &value["detail"], &value]
    {
        if let Some(text) = candidate.as_str() {
            return text.to_owned();
        }
    }
    json.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(json: &str) -> Vec<(String, bool)> {
        let chunk = Chunk::decode(json).unwrap();
        chunk.pieces.iter().map(|p| (p.text.to_string(), p.is_answer)).collect()
    }

    #[test]
    fn role_only_and_empty_deltas_are_no_content() {
        for json in [
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"{"choices":[{"delta":{"role":"assistant","content":null},"finish_reason":null}]}"#,
            r#"{"choices":[{"delta":{}}]}"#,
            r#"{"choices":[],"usage":null}"#,
            r#"{"choices":null}"#,
            r#"{}"#,
        ] {
            assert!(texts(json).is_empty(), "{json}");
        }
    }

    #[test]
    fn everything_that_the_model_produced_is_content() {
        assert_eq!(texts(r#"{"choices":[{"delta":{"content":"a\n"}}]}"#), [("a\n".into(), true)]);
        assert_eq!(texts(r#"{"choices":[{"delta":{"reasoning_content":"r"}}]}"#), [("r".into(), false)]);
        assert_eq!(texts(r#"{"choices":[{"delta":{"reasoning":"r"}}]}"#), [("r".into(), false)]);
        assert_eq!(texts(r#"{"choices":[{"text":"t"}]}"#), [("t".into(), true)]);
        assert_eq!(texts(r#"{"choices":[{"delta":{"refusal":"no"}}]}"#), [("no".into(), true)]);
        let tool =
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{"}}]}}]}"#;
        assert_eq!(texts(tool), [("f".into(), false), ("{".into(), false)]);
    }

    #[test]
    fn usage_and_finish_reason_are_read_wherever_they_stand() {
        let json = r#"{"choices":[{"delta":{},"finish_reason":"length"}],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}"#;
        let chunk = Chunk::decode(json).unwrap();
        assert_eq!(chunk.finish_reason.as_deref(), Some("length"));
        let usage = chunk.usage.unwrap();
        assert_eq!(
            (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            (Some(7), Some(3), Some(4))
        );
        let bare = Chunk::decode(r#"{"usage":{"prompt_tokens":7,"prompt_tokens_details":null}}"#).unwrap();
        assert_eq!(bare.usage.unwrap().cached_tokens, None);
    }

    #[test]
    fn an_empty_finish_reason_is_none() {
        let chunk = Chunk::decode(r#"{"choices":[{"delta":{"content":"a"},"finish_reason":""}]}"#).unwrap();
        assert_eq!(chunk.finish_reason, None);
    }

    #[test]
    fn reasoning_under_two_names_counts_once() {
        let both = r#"{"choices":[{"delta":{"reasoning_content":"r","reasoning":"r"}}]}"#;
        assert_eq!(texts(both), [("r".into(), false)]);
        let second = r#"{"choices":[{"delta":{"reasoning_content":"","reasoning":"r"}}]}"#;
        assert_eq!(texts(second), [("r".into(), false)]);
    }

    #[test]
    fn a_count_that_is_none_is_absent_and_fails_nothing() {
        for (json, tokens) in [
            ("7", Some(7)),
            ("7.0", Some(7)),
            ("4294967295", Some(u32::MAX)),
            ("4294967296", None),
            ("-1", None),
            ("7.5", None),
            ("null", None),
            (r#""7""#, None),
            ("{}", None),
        ] {
            let json = format!(r#"{{"usage":{{"completion_tokens":{json}}}}}"#);
            assert_eq!(Chunk::decode(&json).unwrap().usage.unwrap().completion_tokens, tokens, "{json}");
        }
    }

    #[test]
    fn an_error_object_gives_its_message() {
        let chunk = Chunk::decode(r#"{"error":{"message":"out of memory","code":500}}"#).unwrap();
        assert_eq!(chunk.error.as_deref(), Some("out of memory"));
        assert_eq!(error_text(r#"{"error":{"message":"m"}}"#), "m");
        assert_eq!(error_text("<html>"), "<html>");
    }

    #[test]
    fn usage_tells_cached_and_reasoning_tokens() {
        let json = r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,"prompt_tokens_details":
            {"cached_tokens":4,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":3}}}"#;
        let usage = Chunk::decode(json).unwrap().usage.unwrap();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (Some(9), Some(5)));
        assert_eq!((usage.cached_tokens, usage.reasoning_tokens), (Some(4), Some(3)));
    }
}
