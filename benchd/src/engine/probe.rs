//! What a server takes, found before any load: whether it is there, its models, and the request parameters that it
//! accepts. Takes a [`Server`], gives a [`Probed`]; the preparation and the smoke test build on it.

use std::time::Duration;

use bytes::Bytes;
use proto::record::Outcome;
use proto::report::CalibrationRequest;
use proto::wire::{ErrorCode, Failure};
use reqwest::header::HeaderValue;
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::engine::chunk::error_text;
use crate::engine::clock::Clock;
use crate::engine::exchange::{Observed, Outgoing, exchange};
use crate::engine::server::{MaxTokens, Parameters, Server, chain};

/// Time between two looks at a server that is not ready.
const READY_POLL: Duration = Duration::from_millis(250);
/// Time for the answer to a question that is no completion.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// A server that answered, and how to ask it.
#[derive(Debug)]
pub struct Probed {
    /// Model in use.
    pub model: String,
    /// Models that the server lists; absent when it has no such list.
    pub models: Option<Vec<String>>,
    /// Parameters that it takes.
    pub parameters: Parameters,
    /// What was dropped or renamed, a sentence each.
    pub dropped: Vec<String>,
    /// The requests made.
    pub requests: Vec<CalibrationRequest>,
    /// The answer to the last of them.
    pub answer: Observed,
}

/// Waits for the server, finds the model and the parameters.
pub async fn probe(
    server: &Server,
    wanted_model: Option<&str>,
    extra_body: &Map<String, Value>,
    ready_timeout: Duration,
    output_tokens: u32,
    stop: &CancellationToken,
) -> Result<Probed, Failure> {
    let give_up = tokio::time::Instant::now() + ready_timeout;
    let models = loop {
        match list_models(server).await {
            Ok(models) => break models,
            Err(NotReady { is_final: false, .. }) if tokio::time::Instant::now() < give_up => {
                pause(stop).await?;
            }
            Err(NotReady { failure, .. }) => return Err(failure),
        }
    };
    let model = choose_model(server, wanted_model, models.as_deref())?;
    loop {
        match find_parameters(server, &model, models.as_deref(), extra_body, output_tokens, stop).await {
            Ok(found) => {
                return Ok(Probed {
                    model,
                    models,
                    parameters: found.parameters,
                    dropped: found.dropped,
                    requests: found.requests,
                    answer: found.answer,
                });
            }
            Err(NotReady { is_final: false, .. }) if tokio::time::Instant::now() < give_up => {
                pause(stop).await?;
            }
            Err(NotReady { failure, .. }) => return Err(failure),
        }
    }
}

/// The sentence for a run that was stopped before its load began.
pub fn stopped() -> Failure {
    Failure::new(ErrorCode::Stopped, "stopped before the load began; nothing was measured")
}

async fn pause(stop: &CancellationToken) -> Result<(), Failure> {
    tokio::select! {
        () = stop.cancelled() => Err(stopped()),
        () = tokio::time::sleep(READY_POLL) => Ok(()),
    }
}

struct NotReady {
    failure: Failure,
    /// Waiting does not help.
    is_final: bool,
}

impl NotReady {
    fn for_good(code: ErrorCode, message: String) -> Self {
        NotReady { failure: Failure::new(code, message), is_final: true }
    }
    fn for_now(message: String) -> Self {
        NotReady { failure: Failure::new(ErrorCode::Unreachable, message), is_final: false }
    }
}

/// Asks a question that is no completion; the body of a 2xx answer, else status and body.
pub async fn get(server: &Server, path: &str) -> Result<Result<String, (u16, String)>, reqwest::Error> {
    let request = server.client.get(server.url(path)).headers(server.headers.clone()).timeout(ASK_TIMEOUT);
    text_of(request.send().await?).await
}

/// The same with a JSON body.
pub async fn post(
    server: &Server,
    path: &str,
    body: &Value,
) -> Result<Result<String, (u16, String)>, reqwest::Error> {
    let request = server.client.post(server.url(path)).headers(server.headers.clone()).timeout(ASK_TIMEOUT);
    text_of(request.body(body.to_string()).send().await?).await
}

async fn text_of(response: reqwest::Response) -> Result<Result<String, (u16, String)>, reqwest::Error> {
    let status = response.status();
    let text = response.text().await?;
    Ok(if status.is_success() { Ok(text) } else { Err((status.as_u16(), text)) })
}

async fn list_models(server: &Server) -> Result<Option<Vec<String>>, NotReady> {
    match get(server, "/v1/models").await {
        Err(error) => {
            let is_final = is_certificate_fault(&error);
            let why = server.redact(&chain(&error.without_url()));
            let through =
                server.proxy.as_ref().map(|p| format!(" through the proxy {p}")).unwrap_or_default();
            let mut not_ready = NotReady::for_now(format!(
                "cannot reach {}{through}: {why}; check that the server runs there, or wait for it longer with \
                 --ready-timeout SECONDS",
                server.root
            ));
            not_ready.is_final = is_final;
            Err(not_ready)
        }
        Ok(Ok(text)) => Ok(serde_json::from_str::<Value>(&text).ok().and_then(|list| {
            let names = list["data"].as_array()?.iter();
            Some(names.filter_map(|m| m["id"].as_str().map(str::to_owned)).collect())
        })),
        Ok(Err((status @ (401 | 403), body))) => Err(key_refused(server, status, &body)),
        Ok(Err((status @ (502..=504 | 429), body))) => Err(NotReady::for_now(format!(
            "the server at {} answers {status} ({}); wait for it with --ready-timeout SECONDS",
            server.root,
            server.redact(&error_text(&body))
        ))),
        // Many gateways have no list; the probe will tell.
        Ok(Err(_)) => Ok(None),
    }
}

fn is_certificate_fault(error: &reqwest::Error) -> bool {
    chain(error).contains("certificate")
}

fn key_refused(server: &Server, status: u16, body: &str) -> NotReady {
    let said = server.redact(&error_text(body));
    let said = if said.is_empty() { String::new() } else { format!(" ({said})") };
    NotReady::for_good(
        ErrorCode::Unauthorized,
        format!(
            "the server at {} refused the key with status {status}{said}; give one with --api-key-file FILE or in \
             OPENAI_API_KEY",
            server.root
        ),
    )
}

fn choose_model(server: &Server, wanted: Option<&str>, listed: Option<&[String]>) -> Result<String, Failure> {
    match (wanted, listed) {
        (Some(name), _) => Ok(name.to_owned()),
        (None, Some([only])) => Ok(only.clone()),
        (None, Some(names)) if !names.is_empty() => Err(Failure::new(
            ErrorCode::UnknownModel,
            format!(
                "the server at {} lists {} models; choose one with -m: {}",
                server.root,
                names.len(),
                list(names)
            ),
        )),
        (None, _) => Err(Failure::new(
            ErrorCode::UnknownModel,
            format!(
                "the server at {} lists no model at /v1/models; check the URL, or name a model with -m MODEL",
                server.root
            ),
        )),
    }
}

fn list(names: &[String]) -> String {
    const SHOWN: usize = 10;
    let mut text = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text = format!("{text}, … ({} in all)", names.len());
    }
    text
}

/// A way to change a request that the server did not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    DropIgnoreEos,
    DropMinTokens,
    RenameMaxTokens,
    DropTemperature,
    DropStreamOptions,
}

impl Change {
    const ALL: [Change; 5] = [
        Change::DropIgnoreEos,
        Change::DropMinTokens,
        Change::RenameMaxTokens,
        Change::DropTemperature,
        Change::DropStreamOptions,
    ];

    fn apply(self, parameters: Parameters) -> Parameters {
        match self {
            Change::DropIgnoreEos => Parameters { ignore_eos: false, ..parameters },
            Change::DropMinTokens => Parameters { min_tokens: false, ..parameters },
            Change::RenameMaxTokens => {
                Parameters { max_tokens: MaxTokens::MaxCompletionTokens, ..parameters }
            }
            Change::DropTemperature => Parameters { temperature: false, ..parameters },
            Change::DropStreamOptions => Parameters { stream_options: false, ..parameters },
        }
    }

    /// The parameter's name, as an error message would have it.
    fn parameter(self) -> &'static str {
        match self {
            Change::DropIgnoreEos => "ignore_eos",
            Change::DropMinTokens => "min_tokens",
            Change::RenameMaxTokens => "max_tokens",
            Change::DropTemperature => "temperature",
            Change::DropStreamOptions => "stream_options",
        }
    }

    fn sentence(self) -> String {
        match self {
            Change::RenameMaxTokens => {
                "max_completion_tokens is used, the server refuses max_tokens".to_owned()
            }
            Change::DropIgnoreEos => {
                "ignore_eos is not sent, the server refuses it: replies can be shorter than the OSL"
                    .to_owned()
            }
            Change::DropMinTokens => "min_tokens is not sent, the server refuses it".to_owned(),
            Change::DropTemperature => "temperature is not sent, the server refuses it".to_owned(),
            Change::DropStreamOptions => {
                "stream_options is not sent, the server refuses it: tokens are counted by the tokenizer"
                    .to_owned()
            }
        }
    }
}

struct Found {
    parameters: Parameters,
    dropped: Vec<String>,
    requests: Vec<CalibrationRequest>,
    answer: Observed,
}

async fn find_parameters(
    server: &Server,
    model: &str,
    models: Option<&[String]>,
    extra_body: &Map<String, Value>,
    output_tokens: u32,
    stop: &CancellationToken,
) -> Result<Found, NotReady> {
    let mut asker = Asker { server, model, extra_body, output_tokens, stop, requests: Vec::new() };
    let first = asker.ask(Parameters::default()).await?;
    if first.outcome != Outcome::HttpStatus(400) && first.outcome != Outcome::HttpStatus(422) {
        let answer = accepted(server, model, models, first)?;
        return Ok(Found {
            parameters: Parameters::default(),
            dropped: Vec::new(),
            requests: asker.requests,
            answer,
        });
    }
    let (changes, answer) = match search_changes(&mut asker, &first).await? {
        Some(found) => found,
        // Nothing that we can change was at fault: the first error is the one to show.
        None => return Err(accepted(server, model, models, first).err().unwrap_or_else(unreachable_answer)),
    };
    Ok(Found {
        parameters: changes.iter().fold(Parameters::default(), |p, change| change.apply(p)),
        dropped: changes.iter().map(|change| change.sentence()).collect(),
        requests: asker.requests,
        answer,
    })
}

fn unreachable_answer() -> NotReady {
    NotReady::for_good(ErrorCode::Internal, "a refused probe counted as accepted".to_owned())
}

/// Follows the parameters that the errors name, one at a time; where an error names none, tries each. What then
/// turns out not to have been needed is put back.
async fn search_changes(
    asker: &mut Asker<'_>,
    first: &Observed,
) -> Result<Option<(Vec<Change>, Observed)>, NotReady> {
    let mut kept: Vec<Change> = Vec::new();
    let mut error = first.error.as_deref().unwrap_or_default().to_owned();
    let with = |changes: &[Change]| changes.iter().fold(Parameters::default(), |p, change| change.apply(p));
    let mut answer = 'found: {
        while kept.len() < Change::ALL.len() {
            let open: Vec<Change> = Change::ALL.into_iter().filter(|c| !kept.contains(c)).collect();
            let Some(named) = open.iter().copied().find(|c| error.contains(c.parameter())) else {
                for change in open {
                    let seen = asker.ask(with(&[kept.as_slice(), &[change]].concat())).await?;
                    if seen.outcome.is_ok() {
                        kept.push(change);
                        break 'found seen;
                    }
                }
                return Ok(None);
            };
            kept.push(named);
            let seen = asker.ask(with(&kept)).await?;
            if seen.outcome.is_ok() {
                break 'found seen;
            }
            error = seen.error.as_deref().unwrap_or_default().to_owned();
        }
        return Ok(None);
    };
    if kept.len() > 1 {
        for change in kept.clone() {
            let without: Vec<Change> = kept.iter().copied().filter(|c| *c != change).collect();
            let seen = asker.ask(with(&without)).await?;
            if seen.outcome.is_ok() {
                kept = without;
                answer = seen;
            }
        }
    }
    Ok(Some((kept, answer)))
}

/// Asks small questions and keeps a list of them.
struct Asker<'a> {
    server: &'a Server,
    model: &'a str,
    extra_body: &'a Map<String, Value>,
    output_tokens: u32,
    stop: &'a CancellationToken,
    requests: Vec<CalibrationRequest>,
}

impl Asker<'_> {
    async fn ask(&mut self, parameters: Parameters) -> Result<Observed, NotReady> {
        let mut body = parameters.body_head(self.model, self.output_tokens, self.extra_body);
        body.push_str(r#"{"role":"user","content":"Say hello."}]}"#);
        let seen = ask(self.server, body, "probe", self.stop).await;
        if seen.outcome == Outcome::Aborted {
            return Err(NotReady { failure: stopped(), is_final: true });
        }
        self.requests.push(CalibrationRequest {
            purpose: "probe".to_owned(),
            turns: 1,
            with_system: false,
            content_tokens: None,
            prompt_tokens: seen.usage.and_then(|u| u.prompt_tokens),
            cached_tokens: seen.usage.and_then(|u| u.cached_tokens),
            status: status(seen.outcome),
        });
        Ok(seen)
    }
}

/// Sends one request outside every phase.
pub async fn ask(
    server: &Server,
    body: String,
    session_id: &'static str,
    stop: &CancellationToken,
) -> Observed {
    let outgoing = Outgoing {
        body: Bytes::from(body),
        session_id: HeaderValue::from_static(session_id),
        first_chunk_threshold: 1,
        expected_events: 1,
    };
    let (seen, tail) = exchange(server, &Clock::start(), &outgoing, stop).await;
    tail.finish().await;
    seen
}

/// The status that an outcome stands for; 0: no answer came.
pub fn status(outcome: Outcome) -> u16 {
    match outcome {
        Outcome::HttpStatus(code) => code,
        Outcome::Connect | Outcome::Tls | Outcome::Timeout | Outcome::Reset => 0,
        _ => 200,
    }
}

fn accepted(
    server: &Server,
    model: &str,
    models: Option<&[String]>,
    seen: Observed,
) -> Result<Observed, NotReady> {
    let said = seen.error.as_deref().unwrap_or_default().to_owned();
    let at = &server.root;
    match seen.outcome {
        // An empty answer to so short a question says nothing against the server.
        Outcome::Ok | Outcome::Empty => Ok(seen),
        Outcome::HttpStatus(status @ (401 | 403)) => Err(key_refused(server, status, &said)),
        Outcome::HttpStatus(404) => Err(NotReady::for_good(
            ErrorCode::UnknownModel,
            match models {
                Some(names) if !names.iter().any(|n| n == model) && !names.is_empty() => {
                    format!("the server at {at} has no model {model:?}; it lists {}", list(names))
                }
                _ => format!("the server at {at} answered 404 for model {model:?}: {said}"),
            },
        )),
        Outcome::HttpStatus(status @ (429 | 502..=504)) => Err(NotReady::for_now(format!(
            "the server at {at} answers {status} ({said}); wait for it with --ready-timeout SECONDS"
        ))),
        Outcome::Connect | Outcome::Reset => {
            Err(NotReady::for_now(format!("the server at {at} broke the connection: {said}")))
        }
        Outcome::HttpStatus(status) => Err(NotReady::for_good(
            ErrorCode::Server,
            format!("the server at {at} refused a first request with status {status}: {said}"),
        )),
        other => Err(NotReady::for_good(
            ErrorCode::Server,
            format!("a first request to {at} failed ({}): {said}", other.name()),
        )),
    }
}
