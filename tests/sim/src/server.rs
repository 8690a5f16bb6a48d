//! The server: connections, routes, and what all requests share.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::{Api, ApiError, Tokenize};
use crate::cache::Cache;
use crate::clock::{now_ns, to_ns};
use crate::exchange::{self, Failed, internal};
use crate::faults::Faults;
use crate::http::{Request, Response};
use crate::metrics::Metrics;
use crate::options::Options;
use crate::pacer::Pacer;
use crate::replies::Author;
use crate::timing::Stalls;
use crate::tokens::Tokens;
use crate::truth::{Outcome, Record, TruthSender};
use crate::wire::{Arrived, Wire};

/// What all requests share. The cache is the only state behind a lock, held for one request's blocks.
pub(crate) struct Sim {
    pub(crate) options: Options,
    pub(crate) tokens: Tokens,
    /// The first id above the vocabulary
    pub(crate) vocabulary: u32,
    pub(crate) author: Author,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) pacer: Pacer,
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) faults: Faults,
    pub(crate) stalls: Stalls,
    /// Wall clock at the start, for `created`
    pub(crate) created_s: u64,
    cache: Mutex<Cache>,
    loaded_ns: u64,
    requests: AtomicU64,
    truth: TruthSender,
}

impl Sim {
    /// Everything but the socket.
    pub(crate) fn new(options: Options, tokens: Tokens, author: Author, truth: TruthSender) -> Result<Self> {
        let metrics = Arc::new(Metrics::default());
        let slots = if options.times.slots == 0 { Semaphore::MAX_PERMITS } else { options.times.slots };
        Ok(Self {
            vocabulary: tokens.vocabulary_end(),
            tokens,
            author,
            pacer: Pacer::start(Arc::clone(&metrics))?,
            metrics,
            slots: Arc::new(Semaphore::new(slots)),
            faults: Faults::new(options.seed, options.faults.clone())?,
            stalls: Stalls::new(&options.times, now_ns()),
            created_s: std::time::UNIX_EPOCH.elapsed().map_or(0, |age| age.as_secs()),
            cache: Mutex::new(Cache::new(options.cache.cache_blocks)),
            loaded_ns: now_ns() + to_ns(options.times.loading_s, 1e9),
            requests: AtomicU64::new(0),
            truth,
            options,
        })
    }

    pub(crate) fn lock_cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves connections until `stop`, and returns when the last of them has been logged.
pub(crate) async fn serve(sim: Arc<Sim>, listener: TcpListener, stop: CancellationToken) {
    let tasks = TaskTracker::new();
    for conn in 0.. {
        let socket = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => socket,
                Err(e) => {
                    // Out of files: the others must end first. Accepting again at once would spin.
                    eprintln!("benchsim: cannot accept a connection: {e}");
                    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                    continue;
                }
            },
            () = stop.cancelled() => break,
        };
        if sim.options.times.accept_delay_ms > 0.0 {
            // One after another, as a server whose accept queue is slow.
            tokio::time::sleep(std::time::Duration::from_secs_f64(sim.options.times.accept_delay_ms / 1e3))
                .await;
        }
        let accepted_ns = now_ns();
        tasks.spawn(connection(Arc::clone(&sim), socket, conn, accepted_ns, stop.clone()));
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// One connection, request by request.
async fn connection(sim: Arc<Sim>, socket: TcpStream, conn: u64, accepted_ns: u64, stop: CancellationToken) {
    // Without it, an event could wait for the acknowledgement of the one before.
    let _ = socket.set_nodelay(true);
    let mut wire = Wire::new(socket);
    for conn_request in 1.. {
        let arrived = tokio::select! {
            arrived = wire.request() => arrived,
            () = stop.cancelled() => return,
        };
        let Ok(Some(Arrived { request, first_byte_ns, read_ns })) = arrived else { return };
        let mut record =
            Record { conn, conn_request, accepted_ns, first_byte_ns, read_ns, ..Record::default() };
        record.seq = sim.requests.fetch_add(1, Relaxed);
        if let Ok(request) = &request {
            record.path.clone_from(&request.path);
            record.session.clone_from(&request.session);
        }
        let goes_on = answer(&sim, &mut wire, request, &mut record, &stop).await;
        sim.metrics.requests.fetch_add(1, Relaxed);
        if record.end_ns == 0 {
            record.end_ns = now_ns();
        }
        sim.truth.record(record);
        if !goes_on {
            return;
        }
    }
}

/// Answers one request; whether the connection can take another.
async fn answer(
    sim: &Arc<Sim>,
    wire: &mut Wire,
    request: Result<Request, crate::http::Malformed>,
    record: &mut Record,
    stop: &CancellationToken,
) -> bool {
    let request = match request {
        Ok(request) => request,
        Err(malformed) => {
            let error = ApiError::new(malformed.status, malformed.why);
            return refuse(wire, &error, false, false, record).await;
        }
    };
    let keep_alive = request.keep_alive;
    let head_only = request.method == "HEAD";
    let refused = match route(sim, &request) {
        Ok(Route::Reply(api)) => match exchange::reply(sim, wire, api, request, record, stop).await {
            Ok(()) => return keep_alive,
            Err(Failed::Refused(error)) => Err(error),
            Err(Failed::Faulted(Some(response))) => {
                record.outcome = Outcome::Faulted;
                Ok(response)
            }
            Err(Failed::Faulted(None)) => {
                record.outcome = Outcome::Faulted;
                return false;
            }
            Err(Failed::Closed) => return false,
            Err(Failed::ClientGone) => {
                record.outcome = Outcome::ClientGone;
                return false;
            }
            Err(Failed::Shutdown) => {
                record.outcome = Outcome::Shutdown;
                return false;
            }
        },
        Ok(Route::Tokenize) => {
            let sim = Arc::clone(sim);
            tokio::task::spawn_blocking(move || tokenize(&sim, &request.body))
                .await
                .unwrap_or_else(|e| Err(ApiError::new(500, e.to_string())))
        }
        Ok(Route::Now(response)) => Ok(response),
        Err(error) => Err(error),
    };
    match refused {
        Err(error) => refuse(wire, &error, keep_alive, head_only, record).await,
        Ok(response) => {
            record.status = Some(response.status);
            send(wire, &response, keep_alive, head_only, record).await
        }
    }
}

async fn refuse(
    wire: &Wire,
    error: &ApiError,
    keep_alive: bool,
    head_only: bool,
    record: &mut Record,
) -> bool {
    record.outcome = Outcome::Rejected;
    record.status = Some(error.status);
    record.error = Some(error.message.clone());
    send(wire, &error.response(), keep_alive, head_only, record).await
}

async fn send(
    wire: &Wire,
    response: &Response,
    keep_alive: bool,
    head_only: bool,
    record: &mut Record,
) -> bool {
    let sent = wire.write(&response.render(keep_alive, head_only)).await;
    record.end_ns = now_ns();
    if sent.is_err() {
        record.outcome = Outcome::ClientGone;
    }
    sent.is_ok() && keep_alive
}

enum Route {
    Reply(Api),
    Tokenize,
    Now(Response),
}

fn route(sim: &Sim, request: &Request) -> Result<Route, ApiError> {
    if now_ns() < sim.loaded_ns {
        return Err(ApiError::new(503, "Loading model"));
    }
    let path = request.path.as_str();
    // As vLLM: the key guards /v1 only.
    if let Some(key) = &sim.options.api_key
        && path.starts_with("/v1/")
        && request.authorization.as_deref() != Some(&format!("Bearer {key}"))
    {
        return Err(ApiError::new(401, "Unauthorized: the Authorization header holds no valid key."));
    }
    let is_get = matches!(request.method.as_str(), "GET" | "HEAD");
    let is_post = request.method == "POST";
    match path {
        "/v1/chat/completions" if is_post => Ok(Route::Reply(Api::Chat)),
        "/v1/completions" if is_post => Ok(Route::Reply(Api::Completions)),
        "/tokenize" if is_post => Ok(Route::Tokenize),
        "/v1/models" if is_get => Ok(Route::Now(models(sim))),
        "/health" if is_get => Ok(Route::Now(Response {
            status: 200,
            content_type: "text/plain",
            headers: "",
            body: Vec::new(),
        })),
        "/metrics" if is_get => {
            let text = sim.metrics.render(&sim.options.model, sim.options.cache.cache_blocks);
            Ok(Route::Now(Response {
                status: 200,
                content_type: "text/plain; version=0.0.4",
                headers: "",
                body: text.into(),
            }))
        }
        "/v1/chat/completions" | "/v1/completions" | "/tokenize" | "/v1/models" | "/health" | "/metrics" => {
            Err(ApiError::new(405, format!("{path} does not take {}.", request.method)))
        }
        _ => Err(ApiError::new(404, format!("There is no {path} here."))),
    }
}

fn models(sim: &Sim) -> Response {
    let Options { model, limits, .. } = &sim.options;
    Response::json(
        200,
        &json!({"object": "list", "data": [{
            "id": model, "object": "model", "created": sim.created_s, "owned_by": "benchsim", "root": model,
            "parent": null, "max_model_len": limits.max_model_len,
        }]}),
    )
}

fn tokenize(sim: &Sim, body: &[u8]) -> Result<Response, ApiError> {
    let vllm = |ids: Vec<u32>| {
        json!({"count": ids.len(), "max_model_len": sim.options.limits.max_model_len, "tokens": ids,
               "token_strs": null})
    };
    let answer = match Tokenize::parse(body, &sim.options)? {
        Tokenize::Prompt { text, special } => {
            vllm(sim.tokens.encode_fresh(&text, special).map_err(internal)?)
        }
        Tokenize::Chat { messages, reply_header } => vllm(sim.chat_ids(&messages, reply_header)?.0),
        Tokenize::Content { text, special } => {
            json!({ "tokens": sim.tokens.encode_fresh(&text, special).map_err(internal)? })
        }
    };
    Ok(Response::json(200, &answer))
}
