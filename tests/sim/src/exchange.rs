//! One request for a reply, from its body to its last byte: check, take a slot, tokenise, look into the cache,
//! plan the times, hand the script to the pacer, and keep what happened.
//!
//! The schedule counts from the instant the slot was taken. Tokenising lies inside the time to first token, as
//! on real servers, and on threads of its own; only if it takes longer than that is the first token late.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio_util::sync::CancellationToken;

use crate::api::{Api, ApiError, Ask, Message, Prompt, Seen};
use crate::cache::{BlockHash, block_hashes};
use crate::clock::now_ns;
use crate::faults::{Fault, change, with_length_off};
use crate::http::{Request, Response, stream_head};
use crate::pacer::{End, Performance, Played};
use crate::replies::{Length, Reply, rng};
use crate::script::{Act, Frame, Script, Step};
use crate::server::Sim;
use crate::template::prompt_ids;
use crate::timing::offsets_ns;
use crate::truth::{Outcome, Record};
use crate::wire::Wire;

/// Bodies up to this many bytes are handled where they were read; a thread switch would cost more.
const SMALL_BODY: usize = 1024;

/// Why there was no reply.
pub(crate) enum Failed {
    Refused(ApiError),
    /// A fault struck: answer this, or nothing more
    Faulted(Option<Response>),
    ClientGone,
    Shutdown,
    /// Answered in full, but the connection cannot go on
    Closed,
}

impl From<ApiError> for Failed {
    fn from(error: ApiError) -> Self {
        Self::Refused(error)
    }
}

/// A request that can be answered.
struct Prepared {
    ask: Ask,
    digest: [u8; 32],
    prompt_tokens: u32,
    content_tokens: u32,
    reply: Reply,
    /// Blocks of prompt and reply, without the last token, which is never computed
    blocks: Vec<BlockHash>,
}

/// Counts a request in a gauge for as long as it lives.
struct Gauge<'a>(&'a AtomicU64, u64);

impl<'a> Gauge<'a> {
    fn up(gauge: &'a AtomicU64, by: u64) -> Self {
        gauge.fetch_add(by, Relaxed);
        Self(gauge, by)
    }
}

impl Drop for Gauge<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Relaxed);
    }
}

/// Answers `request` on `wire` and notes in `record` what happened. The connection can go on after `Ok`.
pub(crate) async fn reply(
    sim: &Arc<Sim>,
    wire: &mut Wire,
    api: Api,
    request: Request,
    record: &mut Record,
    stop: &CancellationToken,
) -> Result<(), Failed> {
    let keep_alive = request.keep_alive;
    let small = request.body.len() <= SMALL_BODY;
    let (seen, ask) = off_thread(sim, small, move |sim| {
        let mut seen = Seen::default();
        let ask = Ask::parse(api, &request.body, &sim.options, &mut seen);
        (seen, ask)
    })
    .await;
    let Seen { model, max_tokens, stream, messages, digest } = seen;
    record.digest = digest.map(|digest| digest.iter().map(|byte| format!("{byte:02x}")).collect());
    (record.model, record.max_tokens, record.stream, record.messages) = (model, max_tokens, stream, messages);
    let ask = ask?;
    record.max_tokens = Some(ask.max_tokens);
    let digest = digest.unwrap_or_default();
    let fault = sim.faults.strike(&digest, record.session.as_deref()).filter(|_| ask.stream);
    record.fault = fault.map(|strike| strike.name.clone());
    let fault = fault.map(|strike| strike.fault);
    if let Some(response) = fault.and_then(Fault::refusal) {
        return Err(Failed::Faulted(Some(response)));
    }

    let waiting = Gauge::up(&sim.metrics.waiting, 1);
    let slot = tokio::select! {
        slot = Arc::clone(&sim.slots).acquire_owned() => slot.expect("never closed"),
        () = wire.gone() => return Err(Failed::ClientGone),
        () = stop.cancelled() => return Err(Failed::Shutdown),
    };
    drop(waiting);
    let running = Gauge::up(&sim.metrics.running, 1);
    sim.metrics.peak_running.fetch_max(sim.metrics.running.load(Relaxed), Relaxed);
    let start_ns = now_ns();
    record.start_ns = Some(start_ns);

    let prepared = off_thread(sim, small, move |sim| prepare(sim, ask, digest)).await?;
    record.prompt_tokens = Some(prepared.prompt_tokens);
    record.content_tokens = Some(prepared.content_tokens);

    let blocks = prepared.blocks.len() as u64;
    let in_use = Gauge::up(&sim.metrics.blocks_in_use, blocks);
    let cast = plan(sim, prepared, start_ns, keep_alive, fault, record);
    let mut early = false;
    let played = perform(sim, wire, cast, record, stop, fault, &mut early).await;
    drop((in_use, running, slot));

    record.completion_tokens = Some(played.tokens);
    record.events = played.events;
    record.first_write_ns = played.first_write_ns;
    record.last_write_ns = played.last_write_ns;
    record.end_ns = played.end_ns;
    record.stalled = played.stalled;
    #[allow(clippy::cast_precision_loss)] // lateness stays far below 2^53 ns
    let late_us = played.late_ns_max as f64 / 1e3;
    record.late_us_max = (played.events > 0).then_some(late_us);
    record.writes_ns = played.writes_ns;
    let is_whole = fault.is_none_or(Fault::is_whole);
    let finished = match (played.end, early) {
        _ if !is_whole => &sim.metrics.finished_abort,
        (End::Finished, false) => &sim.metrics.finished_length,
        (End::Finished, true) => &sim.metrics.finished_stop,
        (End::ClientGone | End::Shutdown, _) => &sim.metrics.finished_abort,
    };
    finished.fetch_add(1, Relaxed);
    if !is_whole && played.end != End::Shutdown {
        record.outcome = Outcome::Faulted;
        let goes_on = played.end == End::Finished && fault.is_some_and(|fault| !fault.closes());
        return if goes_on { Ok(()) } else { Err(Failed::Faulted(None)) };
    }
    match played.end {
        End::Finished => {
            record.outcome = if early { Outcome::Early } else { Outcome::Ok };
            if fault.is_some_and(Fault::closes) { Err(Failed::Closed) } else { Ok(()) }
        }
        End::ClientGone => Err(Failed::ClientGone),
        End::Shutdown => Err(Failed::Shutdown),
    }
}

/// Runs `work` away from the threads that read and write, unless it is small.
async fn off_thread<T: Send + 'static>(
    sim: &Arc<Sim>,
    small: bool,
    work: impl FnOnce(&Sim) -> T + Send + 'static,
) -> T {
    if small {
        return work(sim);
    }
    let sim = Arc::clone(sim);
    tokio::task::spawn_blocking(move || work(&sim)).await.expect("it does not panic and is never cancelled")
}

/// Tokenises the prompt and makes the reply and the names of all blocks.
fn prepare(sim: &Sim, ask: Ask, digest: [u8; 32]) -> Result<Prepared, ApiError> {
    let (mut ids, content_tokens) = sim.prompt(&ask.prompt)?;
    let prompt_tokens = count(ids.len())?;
    let content_tokens = count(content_tokens)?;
    let (max_tokens, limit) = (ask.max_tokens, sim.options.limits.max_model_len);
    if u64::from(prompt_tokens) + u64::from(max_tokens) > u64::from(limit) {
        return Err(ApiError::new(
            400,
            format!(
                "This model's maximum context length is {limit} tokens. However, you requested {} tokens \
                 ({prompt_tokens} in the messages, {max_tokens} in the completion). Please reduce the length of \
                 the messages or completion.",
                u64::from(prompt_tokens) + u64::from(max_tokens),
            ),
        ));
    }
    if prompt_tokens == 0 {
        return Err(ApiError::new(400, "The prompt is empty."));
    }
    let length = Length { max_tokens, min_tokens: ask.min_tokens, ignore_eos: ask.ignore_eos };
    let reply = sim.author.reply(&digest, length, &sim.tokens);
    ids.extend_from_slice(&reply.ids[..reply.ids.len() - 1]);
    let blocks = block_hashes(&ids, sim.options.cache.block_size as usize);
    Ok(Prepared { ask, digest, prompt_tokens, content_tokens, reply, blocks })
}

fn count(n: usize) -> Result<u32, ApiError> {
    u32::try_from(n).map_err(|_| ApiError::new(400, format!("{n} tokens are too many.")))
}

/// A script with all that must be known to play it.
struct Cast {
    script: Script,
    head: Vec<u8>,
    blocks: Vec<(BlockHash, u64)>,
    early: bool,
}

/// Looks into the cache, and sets the instant of every token and of every block.
fn plan(
    sim: &Sim,
    prepared: Prepared,
    start_ns: u64,
    keep_alive: bool,
    fault: Option<Fault>,
    record: &mut Record,
) -> Cast {
    let Prepared { ask, digest, prompt_tokens, reply, blocks, .. } = prepared;
    let options = &sim.options;
    let block_size = options.cache.block_size;
    // At least one prompt token is always computed: it gives the first token.
    let usable = (prompt_tokens - 1) / block_size;
    let hits = sim.lock_cache().hits(&blocks[..(usable as usize).min(blocks.len())], now_ns());
    let cached_tokens = u32::try_from(hits).expect("at most usable") * block_size;
    sim.metrics.cache_queries.fetch_add(prompt_tokens.into(), Relaxed);
    sim.metrics.cache_hits.fetch_add(cached_tokens.into(), Relaxed);
    sim.metrics.prompt_tokens.fetch_add(prompt_tokens.into(), Relaxed);
    record.cached_tokens = Some(cached_tokens);

    let mut times = rng(options.seed, "times", &digest);
    let mut dues_ns = offsets_ns(&options.times, &mut times, prompt_tokens - cached_tokens, reply.ids.len());
    dues_ns.iter_mut().for_each(|due| *due += start_ns);
    let per_event = options.stream.tokens_per_event as usize;
    // Tokens of one event come into being together.
    dues_ns.chunks_mut(per_event).for_each(|event| event.fill(event[0]));

    // A block is there when its last token is computed: the prompt's with the first token out, a
    // generated token's with the next one.
    let prompt = prompt_tokens as usize;
    let ready_ns = |block: usize| dues_ns[((block + 1) * block_size as usize).saturating_sub(prompt)];
    let blocks: Vec<_> = blocks.iter().enumerate().map(|(at, hash)| (*hash, ready_ns(at))).collect();
    sim.lock_cache().enter(&blocks);

    let stream = &options.stream;
    let frame = Frame {
        api: ask.api,
        id: format!("{}-sim-{}", if ask.api == Api::Chat { "chatcmpl" } else { "cmpl" }, record.seq),
        created_s: sim.created_s,
        model: options.model.clone(),
        prompt_tokens,
        cached_tokens: (!stream.no_cached_tokens).then_some(cached_tokens),
        usage_at_end: (ask.include_usage || !ask.stream) && !stream.no_usage,
        usage_in_each: (ask.continuous_usage || fault == Some(Fault::UsageEach)) && !stream.no_usage,
        keep_alive,
    };
    let early = reply.early;
    let mut head = Vec::new();
    let mut script = match fault {
        _ if !ask.stream => Script::whole(&frame, &reply, &dues_ns),
        Some(Fault::Json(off)) => {
            let mut script = Script::whole(&frame, &reply, &dues_ns);
            if let Act::Event(answer) = &mut script.steps[0].act {
                *answer = with_length_off(answer, off);
            }
            script
        }
        Some(fault) => {
            let script = Script::streamed(&frame, reply, &dues_ns, per_event, false);
            let mut rng = rng(options.seed, "fault bytes", &digest);
            change(fault, script, start_ns, stream.early_role, keep_alive, &mut rng)
        }
        None => {
            head = stream_head(keep_alive);
            if stream.early_role {
                head.extend(frame.role().unwrap_or_default());
            }
            Script::streamed(&frame, reply, &dues_ns, per_event, stream.early_role)
        }
    };
    if !sim.stalls.is_none() {
        // Then the head has its instant too.
        let head = Act::Bytes(std::mem::take(&mut head));
        script.steps.insert(0, Step { due_ns: start_ns, tokens: 0, act: head });
        script.move_dues(|due_ns| sim.stalls.moved(due_ns));
    }
    Cast { script, head, blocks, early }
}

/// Sends the head, and has the pacer play the rest.
async fn perform(
    sim: &Sim,
    wire: &mut Wire,
    cast: Cast,
    record: &mut Record,
    stop: &CancellationToken,
    fault: Option<Fault>,
    early: &mut bool,
) -> Played {
    let Cast { script, head, blocks, early: is_early } = cast;
    *early = is_early;
    record.due_first_ns = Some(script.due_first_ns());
    if !head.is_empty() && wire.write(&head).await.is_err() {
        let end_ns = now_ns();
        sim.lock_cache().take_back(&blocks, end_ns);
        return Played::nothing(End::ClientGone, end_ns);
    }
    if fault.is_none_or(Fault::sends_head) {
        record.status = Some(200);
    }
    let socket = Arc::clone(&wire.socket);
    let keep_writes = sim.options.truth_writes;
    let id = record.seq;
    let performance = Performance { id, socket, script, read_ns: record.read_ns, keep_writes };
    let mut done = sim.pacer.play(performance);
    let played = tokio::select! {
        played = &mut done => played,
        () = wire.gone() => {
            sim.pacer.end(id, End::ClientGone);
            done.await
        }
        () = stop.cancelled() => {
            sim.pacer.end(id, End::Shutdown);
            done.await
        }
    };
    let played = played.expect("the pacer answers for every script");
    if played.end != End::Finished {
        sim.lock_cache().take_back(&blocks, played.end_ns);
    }
    played
}

impl Sim {
    /// Ids of a prompt, and how many of them are content.
    pub(crate) fn prompt(&self, prompt: &Prompt) -> Result<(Vec<u32>, usize), ApiError> {
        match prompt {
            Prompt::Chat(messages) => self.chat_ids(messages, true),
            Prompt::Text(text) => {
                let ids = self.tokens.encode(text).map_err(internal)?.to_vec();
                let content = ids.len();
                Ok((ids, content))
            }
            Prompt::Ids(ids) => Ok((ids.clone(), ids.len())),
        }
    }

    pub(crate) fn chat_ids(
        &self,
        messages: &[Message],
        reply_header: bool,
    ) -> Result<(Vec<u32>, usize), ApiError> {
        let contents: Vec<Arc<[u32]>> = messages
            .iter()
            .map(|message| self.tokens.encode(&message.content).map_err(internal))
            .collect::<Result<_, _>>()?;
        let parts: Vec<(&str, &[u32])> =
            messages.iter().zip(&contents).map(|(message, ids)| (message.role.as_str(), &ids[..])).collect();
        let mut template = self.options.template;
        if !reply_header {
            template.reply = 0;
        }
        let content = contents.iter().map(|ids| ids.len()).sum();
        Ok((prompt_ids(template, self.vocabulary, &parts), content))
    }
}

pub(crate) fn internal(error: anyhow::Error) -> ApiError {
    ApiError::new(500, format!("{error:#}"))
}
