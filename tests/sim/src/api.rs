//! The OpenAI API as JSON: a body in, what it asks for out; or the error object that says what is wrong.
//!
//! The digest of a request is the SHA-256 over, for each message in order: the length of its role in bytes
//! (u64, little-endian), the role, the length of its content, the content. Text parts of one message are
//! joined by a newline, as vLLM does. A completion's prompt counts as one message of role `prompt`.

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::http::Response;
use crate::options::Options;

/// Which API a request came by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Completions,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) role: String,
    pub(crate) content: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Chat(Vec<Message>),
    Text(String),
    Ids(Vec<u32>),
}

/// A request for a reply.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) api: Api,
    pub(crate) prompt: Prompt,
    pub(crate) max_tokens: u32,
    pub(crate) min_tokens: u32,
    pub(crate) ignore_eos: bool,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
}

/// A request for token ids.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Tokenize {
    /// vLLM's, of a text
    Prompt { text: String, special: bool },
    /// vLLM's, of a chat; `reply_header` unless add_generation_prompt is false
    Chat { messages: Vec<Message>, reply_header: bool },
    /// llama.cpp's
    Content { text: String, special: bool },
}

/// An answer that is no success.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: u16,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
}

impl ApiError {
    pub(crate) fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None }
    }

    fn param(name: &str, message: impl Into<String>) -> Self {
        Self { status: 400, message: message.into(), param: Some(name.to_owned()) }
    }

    /// The error object, shaped as vLLM's.
    pub(crate) fn response(&self) -> Response {
        let kind = match self.status {
            400 => "BadRequestError",
            401 => "AuthenticationError",
            404 => "NotFoundError",
            405 => "MethodNotAllowedError",
            500 => "InternalServerError",
            503 => "ServiceUnavailableError",
            _ => "Error",
        };
        let error = json!({"message": self.message, "type": kind, "param": self.param, "code": self.status});
        Response::json(self.status, &json!({ "error": error }))
    }
}

/// What the log keeps of a request even when it is refused.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) model: Option<String>,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) stream: Option<bool>,
    pub(crate) messages: Option<usize>,
    pub(crate) digest: Option<[u8; 32]>,
}

impl Ask {
    /// Reads the body of a chat or text completion; `seen` gets what could be read even if it is refused.
    pub(crate) fn parse(api: Api, body: &[u8], options: &Options, seen: &mut Seen) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        seen.model = fields.0.get("model").and_then(Value::as_str).map(str::to_owned);
        let max_completion = fields.count("max_completion_tokens", 1)?;
        let max = fields.count("max_tokens", 1)?;
        seen.max_tokens = max_completion.or(max);
        let stream = fields.flag("stream")?.unwrap_or(false);
        seen.stream = Some(stream);
        let prompt = match api {
            Api::Chat => Prompt::Chat(fields.messages()?),
            Api::Completions => fields.prompt()?,
        };
        seen.messages = Some(if let Prompt::Chat(messages) = &prompt { messages.len() } else { 1 });
        seen.digest = Some(digest(&prompt));

        check_model(seen.model.as_deref(), &options.model)?;
        for name in &options.limits.reject {
            if fields.0.contains_key(name) {
                let hint = if name == "max_tokens" { " Use 'max_completion_tokens' instead." } else { "" };
                return Err(ApiError::param(
                    name,
                    format!("Unsupported parameter: '{name}' is not supported with this model.{hint}"),
                ));
            }
        }
        let max_tokens = max_completion.or(max).unwrap_or(options.reply.default_max_tokens);
        let min_tokens = fields.count("min_tokens", 0)?.unwrap_or(0);
        if min_tokens > max_tokens {
            return Err(ApiError::param(
                "min_tokens",
                format!(
                    "min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
                ),
            ));
        }
        fields.number("temperature", 0.0, f64::INFINITY)?;
        fields.number("top_p", 0.0, 1.0)?;
        if fields.count("n", 1)?.is_some_and(|n| n > 1) {
            return Err(ApiError::param("n", "n must be 1: benchsim gives one choice."));
        }
        let ignore_eos = fields.flag("ignore_eos")?.unwrap_or(false);
        let mut include_usage = false;
        let mut continuous_usage = false;
        if let Some(value) = fields.value("stream_options") {
            let Value::Object(map) = value else {
                return Err(ApiError::param("stream_options", "stream_options must be an object."));
            };
            if !stream {
                return Err(ApiError::param(
                    "stream_options",
                    "Stream options can only be defined when `stream=True`.",
                ));
            }
            let mut inner = Fields(map.clone());
            include_usage = inner.flag("include_usage")?.unwrap_or(false);
            continuous_usage = include_usage && inner.flag("continuous_usage_stats")?.unwrap_or(false);
        }
        Ok(Self { api, prompt, max_tokens, min_tokens, ignore_eos, stream, include_usage, continuous_usage })
    }
}

impl Tokenize {
    pub(crate) fn parse(body: &[u8], options: &Options) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        if let Some(text) = fields.text("content")? {
            return Ok(Self::Content { text, special: fields.flag("add_special")?.unwrap_or(false) });
        }
        if fields.0.contains_key("model") {
            check_model(fields.0.get("model").and_then(Value::as_str), &options.model)?;
        }
        if let Some(text) = fields.text("prompt")? {
            return Ok(Self::Prompt { text, special: fields.flag("add_special_tokens")?.unwrap_or(true) });
        }
        if fields.0.contains_key("messages") {
            let reply_header = fields.flag("add_generation_prompt")?.unwrap_or(true);
            return Ok(Self::Chat { messages: fields.messages()?, reply_header });
        }
        Err(ApiError::new(400, "One of 'prompt', 'messages' and 'content' is needed."))
    }
}

fn check_model(asked: Option<&str>, served: &str) -> Result<(), ApiError> {
    match asked {
        // As vLLM: without a name, the served model answers.
        None => Ok(()),
        Some(name) if name == served => Ok(()),
        Some(name) => Err(ApiError::new(404, format!("The model `{name}` does not exist."))),
    }
}

/// SHA-256 over the canonical messages (see the top of this file).
pub(crate) fn digest(prompt: &Prompt) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut put = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    match prompt {
        Prompt::Chat(messages) => messages.iter().for_each(|message| {
            put(&message.role);
            put(&message.content);
        }),
        Prompt::Text(text) => {
            put("prompt");
            put(text);
        }
        Prompt::Ids(ids) => {
            put("prompt_ids");
            put(&ids.iter().map(u32::to_string).collect::<Vec<_>>().join(","));
        }
    }
    hash.finalize().into()
}

/// The fields of a JSON object, taken by name and type. `null` counts as absent.
struct Fields(Map<String, Value>);

impl Fields {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => {
                Ok(Self(map.into_iter().filter(|(_, value)| !value.is_null()).collect()))
            }
            Ok(_) => Err(ApiError::new(400, "The body must be a JSON object.")),
            Err(e) => Err(ApiError::new(400, format!("The body is not JSON: {e}"))),
        }
    }

    fn value(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn count(&self, name: &str, least: u32) -> Result<Option<u32>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        match value.as_u64().and_then(|n| u32::try_from(n).ok()) {
            Some(n) if n >= least => Ok(Some(n)),
            _ => Err(ApiError::param(
                name,
                format!("{name} must be a whole number of at least {least}, got {value}."),
            )),
        }
    }

    fn number(&self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if (least..=most).contains(&x) => Ok(Some(x)),
            _ => Err(ApiError::param(name, format!("{name} must lie in [{least}, {most}], got {value}."))),
        }
    }

    fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(value) => Err(ApiError::param(name, format!("{name} must be true or false, got {value}."))),
        }
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.0.remove(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::param(name, format!("{name} must be a string."))),
        }
    }

    fn prompt(&mut self) -> Result<Prompt, ApiError> {
        let bad = || ApiError::param("prompt", "prompt must be one string or one array of token ids.");
        match self.0.remove("prompt") {
            Some(Value::String(text)) => Ok(Prompt::Text(text)),
            Some(Value::Array(ids)) => ids
                .iter()
                .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(bad))
                .collect::<Result<_, _>>()
                .map(Prompt::Ids),
            _ => Err(bad()),
        }
    }

    fn messages(&mut self) -> Result<Vec<Message>, ApiError> {
        let bad = |why: &str| ApiError::param("messages", format!("messages {why}."));
        let Some(Value::Array(messages)) = self.0.remove("messages") else {
            return Err(bad("must be an array"));
        };
        if messages.is_empty() {
            return Err(bad("must not be empty"));
        }
        messages
            .into_iter()
            .map(|message| {
                let Value::Object(mut message) = message else { return Err(bad("must hold objects")) };
                let Some(Value::String(role)) = message.remove("role") else {
                    return Err(bad("must each have a role"));
                };
                let content = match message.remove("content") {
                    Some(Value::String(text)) => text,
                    // An assistant message that only called tools has no content.
                    None | Some(Value::Null) if role == "assistant" => String::new(),
                    Some(Value::Array(parts)) => {
                        let texts: Option<Vec<&str>> = parts.iter().map(text_part).collect();
                        texts.ok_or_else(|| bad("may hold text parts only"))?.join("\n")
                    }
                    _ => return Err(bad("must each have content: a string or an array of text parts")),
                };
                Ok(Message { role, content })
            })
            .collect()
    }
}

fn text_part(part: &Value) -> Option<&str> {
    (part.get("type")? == "text").then(|| part.get("text")?.as_str()).flatten()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn ask_with(args: &[&str], api: Api, body: &Value) -> Result<Ask, ApiError> {
        let options = Options::try_parse_from([&["benchsim"], args].concat()).unwrap();
        Ask::parse(api, body.to_string().as_bytes(), &options, &mut Seen::default())
    }

    fn chat(extra: Value) -> Value {
        let mut body = json!({"model": "sim", "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    }

    fn refused(extra: Value) -> (u16, Option<String>) {
        let error = ask_with(&[], Api::Chat, &chat(extra)).unwrap_err();
        (error.status, error.param)
    }

    #[test]
    fn defaults_are_filled_in() {
        let ask = ask_with(&[], Api::Chat, &chat(json!({"max_tokens": null}))).unwrap();
        assert_eq!((ask.max_tokens, ask.min_tokens), (128, 0));
        assert!(!ask.ignore_eos && !ask.stream && !ask.include_usage);
    }

    #[test]
    fn max_completion_tokens_comes_before_max_tokens() {
        let body = chat(json!({"max_tokens": 3, "max_completion_tokens": 4}));
        assert_eq!(ask_with(&[], Api::Chat, &body).unwrap().max_tokens, 4);
    }

    #[test]
    fn bad_values_are_refused_by_name() {
        assert_eq!(refused(json!({"max_tokens": 0})), (400, Some("max_tokens".into())));
        assert_eq!(refused(json!({"max_tokens": 2, "min_tokens": 3})), (400, Some("min_tokens".into())));
        assert_eq!(refused(json!({"temperature": -1})), (400, Some("temperature".into())));
        assert_eq!(refused(json!({"stream": "yes"})), (400, Some("stream".into())));
        assert_eq!(refused(json!({"stream_options": {}})), (400, Some("stream_options".into())));
        assert_eq!(refused(json!({"messages": []})), (400, Some("messages".into())));
        assert_eq!(refused(json!({"model": "other"})), (404, None));
    }

    #[test]
    fn a_rejected_parameter_is_named_only_when_present() {
        let args = ["--reject", "ignore_eos", "--reject", "max_tokens"];
        assert!(ask_with(&args, Api::Chat, &chat(json!({}))).is_ok());
        let error = ask_with(&args, Api::Chat, &chat(json!({"ignore_eos": false}))).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some("ignore_eos")));
        let error = ask_with(&args, Api::Chat, &chat(json!({"max_tokens": 1}))).unwrap_err();
        assert!(error.message.contains("max_completion_tokens"));
        assert!(ask_with(&args, Api::Chat, &chat(json!({"max_completion_tokens": 1}))).is_ok());
    }

    #[test]
    fn what_was_read_is_kept_of_a_refused_request() {
        let options = Options::try_parse_from(["benchsim"]).unwrap();
        let mut seen = Seen::default();
        let body = chat(json!({"model": "x", "max_tokens": 9})).to_string();
        assert!(Ask::parse(Api::Chat, body.as_bytes(), &options, &mut seen).is_err());
        assert_eq!((seen.model.as_deref(), seen.max_tokens, seen.messages), (Some("x"), Some(9), Some(1)));
        assert!(seen.digest.is_some());
    }

    #[test]
    fn the_digest_covers_roles_contents_and_their_borders() {
        let of = |messages: &[(&str, &str)]| {
            let message =
                |(role, content): &(&str, &str)| Message { role: (*role).into(), content: (*content).into() };
            digest(&Prompt::Chat(messages.iter().map(message).collect()))
        };
        let one = of(&[("user", "ab"), ("assistant", "c")]);
        assert_eq!(one, of(&[("user", "ab"), ("assistant", "c")]));
        assert_ne!(one, of(&[("user", "a"), ("assistant", "bc")]));
        assert_ne!(one, of(&[("system", "ab"), ("assistant", "c")]));
        // The definition in full, so that others can compute it: sha256(4, "user", 2, "hi").
        let hex: String = of(&[("user", "hi")]).iter().map(|byte| format!("{byte:02x}")).collect();
        let by_hand = Sha256::digest(b"\x04\0\0\0\0\0\0\0user\x02\0\0\0\0\0\0\0hi");
        assert_eq!(hex, by_hand.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    }

    #[test]
    fn text_parts_are_joined_and_other_parts_refused() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let ask =
            ask_with(&[], Api::Chat, &json!({"messages": [{"role": "user", "content": parts}]})).unwrap();
        assert_eq!(ask.prompt, Prompt::Chat(vec![Message { role: "user".into(), content: "a\nb".into() }]));
        let image = json!([{"type": "image_url", "image_url": {}}]);
        assert!(
            ask_with(&[], Api::Chat, &json!({"messages": [{"role": "user", "content": image}]})).is_err()
        );
    }

    #[test]
    fn tokenize_comes_in_three_forms() {
        let options = Options::try_parse_from(["benchsim"]).unwrap();
        let parse = |body: Value| Tokenize::parse(body.to_string().as_bytes(), &options);
        assert!(matches!(
            parse(json!({"model": "sim", "prompt": "a"})),
            Ok(Tokenize::Prompt { special: true, .. })
        ));
        assert!(matches!(parse(json!({"content": "a"})), Ok(Tokenize::Content { special: false, .. })));
        let chat = parse(json!({"messages": [{"role": "user", "content": "a"}]}));
        assert!(matches!(chat, Ok(Tokenize::Chat { reply_header: true, .. })));
        assert_eq!(parse(json!({})).unwrap_err().status, 400);
    }
}
