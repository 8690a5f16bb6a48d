//! The server under test as the engine reaches it: URLs, HTTP clients, headers, the request's fixed part. Made once
//! for a run from a target and its secrets; used by the preparation and by every exchange.

use std::time::Duration;

use proto::plan::Target;
use proto::wire::{ErrorCode, Failure, Secrets};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Map, Value, json};

use crate::engine::connect::WatchConnects;

/// Seconds that a kept connection may idle; below the 5 s after which common servers close theirs, so that a
/// request seldom meets a connection that is just being closed.
const POOL_IDLE: Duration = Duration::from_secs(4);
/// Time for a TCP and TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Beginnings of error texts that say nothing but that there is a cause.
const EMPTY_LAYERS: [&str; 3] = ["error sending request", "client error (", "error decoding response body"];

/// How to reach the server.
#[derive(Clone, Debug)]
pub struct Server {
    /// Keeps connections.
    pub client: reqwest::Client,
    /// Never keeps one: for the request that goes out again after a kept connection turned out to be closed.
    pub fresh_client: reqwest::Client,
    /// Proxy, without user info; absent: none.
    pub proxy: Option<String>,
    /// Base URL without `/v1` and without a slash at its end.
    pub root: String,
    /// URL of chat completions.
    pub chat_url: reqwest::Url,
    /// Headers of every request, secrets included.
    pub headers: HeaderMap,
    /// From sent to the end.
    pub request_timeout: Duration,
    /// Texts that must not appear in any error.
    secrets: Vec<String>,
}

impl Server {
    /// Builds the clients; fails on values that cannot be used.
    pub fn new(target: &Target, secrets: &Secrets) -> Result<Self, Failure> {
        let bad = |message: String| Failure::new(ErrorCode::BadValue, message);
        let parsed = reqwest::Url::parse(&target.url)
            .map_err(|e| bad(format!("the URL {:?} cannot be used: {e}", target.url)))?;
        if parsed.host_str().is_none() {
            return Err(bad(format!("the URL {:?} has no host", target.url)));
        }
        let root = target.url.trim_end_matches('/');
        let root = root.strip_suffix("/chat/completions").unwrap_or(root);
        let root = root.strip_suffix("/v1").unwrap_or(root).trim_end_matches('/').to_owned();
        let chat_url = reqwest::Url::parse(&format!("{root}/v1/chat/completions"))
            .map_err(|e| bad(format!("the URL {root:?} cannot be used: {e}")))?;
        let headers = headers(target, secrets).map_err(bad)?;
        let build = |keeps: bool| -> Result<reqwest::Client, Failure> {
            let mut builder = reqwest::Client::builder()
                .http1_only()
                .tcp_nodelay(true)
                .connect_timeout(CONNECT_TIMEOUT)
                .redirect(reqwest::redirect::Policy::none())
                // What goes out again, and when, is the exchange's decision.
                .retry(reqwest::retry::never())
                .connector_layer(WatchConnects)
                .pool_idle_timeout(POOL_IDLE)
                .pool_max_idle_per_host(if keeps { usize::MAX } else { 0 });
            builder = match &target.proxy {
                Some(url) => builder.proxy(reqwest::Proxy::all(url).map_err(|e| {
                    bad(format!("the URL of the proxy cannot be used: {}", chain(&e.without_url())))
                })?),
                None => builder.no_proxy(),
            };
            if let Some(path) = &target.ca_cert {
                let pem = std::fs::read(path)
                    .map_err(|e| bad(format!("the CA certificate {path:?} cannot be read: {e}")))?;
                let certificates = reqwest::Certificate::from_pem_bundle(&pem)
                    .map_err(|e| bad(format!("{path:?} holds no PEM certificate: {e}")))?;
                builder = builder.tls_certs_merge(certificates);
            }
            if target.insecure {
                builder = builder.tls_danger_accept_invalid_certs(true);
            }
            builder.build().map_err(|e| bad(format!("the HTTP client cannot be set up: {}", chain(&e))))
        };
        let proxy = target.proxy.as_deref().and_then(|url| reqwest::Url::parse(url).ok());
        let proxy =
            proxy.and_then(|url| Some(format!("{}:{}", url.host_str()?, url.port_or_known_default()?)));
        Ok(Server {
            proxy,
            client: build(true)?,
            fresh_client: build(false)?,
            root,
            chat_url,
            headers,
            request_timeout: Duration::from_secs_f64(target.request_timeout_s),
            secrets: secrets
                .api_key
                .iter()
                .cloned()
                .chain(secrets.headers.iter().map(|(_, v)| v.clone()))
                .collect(),
        })
    }

    /// A URL outside the OpenAI API, such as `/metrics`.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.root)
    }

    /// A text from the outside, fit for a log or a report: secrets removed, of bounded length, in one line.
    pub fn redact(&self, text: &str) -> String {
        const LONGEST: usize = 300;
        let mut text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for secret in self.secrets.iter().filter(|s| !s.is_empty()) {
            text = text.replace(secret.as_str(), "[secret]");
        }
        match text.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text,
        }
    }
}

fn headers(target: &Target, secrets: &Secrets) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    headers.insert("accept", HeaderValue::from_static("text/event-stream, application/json"));
    // A compressed stream would be held back until a block is full. What insists is still decoded.
    headers.insert("accept-encoding", HeaderValue::from_static("identity"));
    headers.insert("user-agent", HeaderValue::from_static(concat!("benchd/", env!("CARGO_PKG_VERSION"))));
    if let Some(key) = &secrets.api_key {
        let mut value = HeaderValue::try_from(format!("Bearer {key}"))
            .map_err(|_| "the API key has characters that a header cannot carry".to_owned())?;
        value.set_sensitive(true);
        headers.insert("authorization", value);
    }
    let open = target.headers.iter().map(|header| (header, false));
    for ((name, value), is_secret) in open.chain(secrets.headers.iter().map(|header| (header, true))) {
        let shown = if is_secret { "" } else { value.as_str() };
        let name = HeaderName::try_from(name.as_str()).map_err(|_| format!("{name:?} is no header name"))?;
        let mut value = HeaderValue::try_from(value.as_str()).map_err(|_| {
            format!("the value {shown:?} of header {name} has characters that a header cannot carry")
        })?;
        value.set_sensitive(is_secret);
        headers.insert(name, value);
    }
    Ok(headers)
}

/// Which parameters go into a request; the probe finds what the server takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// Name of the output length.
    pub max_tokens: MaxTokens,
    /// `ignore_eos: true`.
    pub ignore_eos: bool,
    /// `min_tokens`, equal to the output length.
    pub min_tokens: bool,
    /// `temperature: 0`.
    pub temperature: bool,
    /// `stream_options.include_usage: true`.
    pub stream_options: bool,
}

/// Name of the output length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTokens {
    /// `max_tokens`.
    MaxTokens,
    /// `max_completion_tokens`.
    MaxCompletionTokens,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            max_tokens: MaxTokens::MaxTokens,
            ignore_eos: true,
            min_tokens: true,
            temperature: true,
            stream_options: true,
        }
    }
}

impl Parameters {
    /// The beginning of a request body, up to and with `"messages":[`; messages and `]}` follow.
    pub fn body_head(&self, model: &str, output_tokens: u32, extra: &Map<String, Value>) -> String {
        let mut body = Map::new();
        body.insert("model".into(), model.into());
        let name = match self.max_tokens {
            MaxTokens::MaxTokens => "max_tokens",
            MaxTokens::MaxCompletionTokens => "max_completion_tokens",
        };
        body.insert(name.into(), output_tokens.into());
        if self.ignore_eos {
            body.insert("ignore_eos".into(), true.into());
        }
        if self.min_tokens {
            body.insert("min_tokens".into(), output_tokens.into());
        }
        if self.temperature {
            body.insert("temperature".into(), 0.into());
        }
        body.insert("stream".into(), true.into());
        if self.stream_options {
            body.insert("stream_options".into(), json!({"include_usage": true}));
        }
        for (name, value) in extra {
            body.insert(name.clone(), value.clone());
        }
        let mut head = Value::Object(body).to_string();
        head.pop();
        head.push_str(",\"messages\":[");
        head
    }
}

/// An error with its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut texts = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        texts.push(error.to_string());
        cause = error.source();
    }
    let innermost = texts.len() - 1;
    let mut kept = texts
        .iter()
        .enumerate()
        .filter(|(i, text)| *i == innermost || !EMPTY_LAYERS.iter().any(|layer| text.starts_with(layer)));
    let first = kept.next().map(|(_, text)| text.clone()).unwrap_or_default();
    // Some errors repeat their cause.
    kept.fold(first, |all, (_, text)| if all.ends_with(text) { all } else { format!("{all}: {text}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Target {
        serde_json::from_value(json!({ "url": url })).unwrap()
    }

    fn server(url: &str, secrets: &Secrets) -> Server {
        crate::install_tls();
        Server::new(&target(url), secrets).unwrap()
    }

    #[test]
    fn the_base_url_may_have_v1_or_not() {
        for url in
            ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"]
        {
            let server = server(url, &Secrets::default());
            assert_eq!(server.chat_url.as_str(), "http://h:1/v1/chat/completions");
            assert_eq!(server.url("/metrics"), "http://h:1/metrics");
        }
        assert_eq!(server("http://h/openai/v1", &Secrets::default()).root, "http://h/openai");
    }

    #[test]
    fn a_secret_never_leaves_by_an_error() {
        let secrets =
            Secrets { api_key: Some("sk-123".into()), headers: vec![("x-api-key".into(), "abc".into())] };
        let server = server("http://h", &secrets);
        assert_eq!(server.redact("bad key sk-123,\n abc"), "bad key [secret], [secret]");
        assert!(!format!("{server:?}").contains("Bearer sk-123"));
    }

    #[test]
    fn extra_fields_win_over_our_own() {
        let extra = json!({"temperature": 0.7, "top_k": 5});
        let head = Parameters::default().body_head("m", 9, extra.as_object().unwrap());
        let body: Value = serde_json::from_str(&format!("{head}]}}")).unwrap();
        assert_eq!(body["temperature"], 0.7);
        assert_eq!(
            (&body["top_k"], &body["min_tokens"], &body["max_tokens"]),
            (&json!(5), &json!(9), &json!(9))
        );
        assert_eq!(body["messages"], json!([]));
    }

    #[test]
    fn an_error_names_its_causes_and_not_the_layers_above_them() {
        #[derive(Debug, thiserror::Error)]
        #[error("{0}")]
        struct Layer(&'static str, #[source] Option<Box<Layer>>);
        let innermost = Layer("Connection refused", None);
        let connect = Layer("tcp connect error", Some(Box::new(innermost)));
        let client = Layer("client error (Connect)", Some(Box::new(connect)));
        let top = Layer("error sending request", Some(Box::new(client)));
        assert_eq!(chain(&top), "tcp connect error: Connection refused");
        assert_eq!(chain(&Layer("error sending request", None)), "error sending request");
    }
}
