//! Everything between a plan and its load: the solved workload, a server that answers, the tokenizer and its words,
//! the template's cost. Gives a [`Prepared`], from which any schedule can run; no request of it lies in a phase.

use std::sync::Arc;
use std::time::Duration;

use proto::plan::Plan;
use proto::record::Outcome;
use proto::report::{CalibrationRequest, Config, Preparation};
use proto::spec::{Spec, TemplateCost};
use proto::wire::{ErrorCode, Failure, Secrets};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;

use crate::engine::observer::Observer;
use crate::engine::probe::{Probed, ask, post, probe, status};
use crate::engine::server::{Server, chain};
use crate::engine::session::{Conversation, SharedConversation};
use crate::engine::solve::{message_tokens, solve};
use crate::engine::tokenizer::{Resolved, Tokenizer, resolve};
use crate::engine::words::Words;

/// Output tokens of the requests made here.
const PROBE_TOKENS: u32 = 1;
/// Tokens of each text of a calibration request.
const CALIBRATION_TOKENS: u32 = 8;
/// Seeds are drawn below this, so that every JSON reader keeps them exactly.
const SEED_LIMIT: u64 = 1 << 53;
/// Raised when the same seed and plan give other prompts or instants than before.
const GENERATOR_VERSION: u32 = 1;

/// A plan that can be run.
#[derive(Debug)]
pub struct Prepared {
    /// The server.
    pub server: Server,
    /// What all sessions have in common.
    pub conversation: SharedConversation,
    /// The configuration, defaults resolved.
    pub config: Config,
    /// What was found out.
    pub preparation: Preparation,
    /// Seed in use.
    pub seed: u64,
    /// Digest of what fixes the planned messages and due instants.
    pub plan_hash: String,
}

/// Prepares a plan that was validated.
pub async fn prepare(
    plan: &Plan,
    secrets: &Secrets,
    observer: &Observer,
    stop: &CancellationToken,
) -> Result<Prepared, Failure> {
    let spec = solve_plan(plan)?;
    let server = Server::new(&plan.target, secrets)?;
    let ready_timeout = Duration::from_secs_f64(plan.target.ready_timeout_s);
    let wanted = plan.target.model.as_deref();
    let probed = probe(&server, wanted, &plan.target.extra_body, ready_timeout, PROBE_TOKENS, stop).await?;
    let mut preparation = Preparation {
        dropped_parameters: probed.dropped.clone(),
        calibration: probed.requests.clone(),
        notices: spec.notices.clone(),
        ..Preparation::default()
    };
    let (words, tokenizer) = find_words(&server, plan, &probed.model, &mut preparation.notices).await?;
    observer.notice(format!(
        "{} words of one token each, by the tokenizer {}",
        words.len(),
        tokenizer.as_ref().map_or("server", Tokenizer::label)
    ));
    let seed = plan.seed.unwrap_or_else(|| rand::random_range(0..SEED_LIMIT));
    let calibrator =
        Calibrator { server: &server, plan, probed: &probed, words: &words, seed: rand::random(), stop };
    let template = calibrator.run(&spec, &mut preparation).await?;
    preparation.template = template;
    if template.is_none() {
        preparation.notices.push(
            "the server tells no usage: the chat template's tokens are not counted, and prompts are longer than the \
             plan by them"
                .to_owned(),
        );
    }
    let template = template.unwrap_or(TemplateCost { first_turn_tokens: 0, later_turn_tokens: 0 });
    let tokens =
        message_tokens(&spec, template).map_err(|e| Failure::new(ErrorCode::Infeasible, e.to_string()))?;
    let tokenizer_sha256 = tokenizer.as_ref().map(|t| t.sha256().to_owned());
    let config = Config {
        url: server.root.clone(),
        model: probed.model.clone(),
        tokenizer: tokenizer.as_ref().map_or("server", Tokenizer::label).to_owned(),
        tokenizer_sha256: tokenizer_sha256.clone(),
        load: plan.load.clone(),
        seed,
        request_timeout_s: plan.target.request_timeout_s,
        extra_body: plan.target.extra_body.clone(),
    };
    let plan_hash = hash(&json!({
        "generator": GENERATOR_VERSION,
        "workload": plan.workload,
        "load": plan.load,
        "seed": seed,
        "tokenizer": tokenizer_sha256,
        "template": template,
    }));
    let conversation = Arc::new(Conversation {
        body_head: probed.parameters.body_head(&probed.model, spec.osl, &plan.target.extra_body),
        first_chunk_threshold: plan.workload.first_chunk_threshold,
        session_prefix: session_prefix(seed),
        spec,
        tokens,
        template,
        words,
        tokenizer,
        seed,
    });
    Ok(Prepared { server, conversation, config, preparation, seed, plan_hash })
}

/// Solves a plan's workload.
pub fn solve_plan(plan: &Plan) -> Result<Spec, Failure> {
    solve(&plan.workload).map_err(|e| Failure::new(ErrorCode::Infeasible, e.to_string()))
}

/// A prefix by which the sessions of this run differ from those of any other, also with the same seed.
fn session_prefix(seed: u64) -> String {
    format!("{seed:x}-{:06x}", rand::random_range(0..1u32 << 24))
}

fn hash(value: &Value) -> String {
    hex(&Sha256::digest(value.to_string()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The words of prompts, and the tokenizer that counts replies unless only the server could.
async fn find_words(
    server: &Server,
    plan: &Plan,
    model: &str,
    notices: &mut Vec<String>,
) -> Result<(Words, Option<Tokenizer>), Failure> {
    let failed = |text: String| Failure::new(ErrorCode::Tokenizer, text);
    let (asked, model_name) = (plan.target.tokenizer.clone(), model.to_owned());
    // Files, the hub and the search for words block.
    let local = tokio::task::spawn_blocking(move || {
        Ok(match resolve(asked.as_deref(), &model_name).map_err(|e| e.to_string())? {
            Resolved::Local(tokenizer) => {
                let words = Words::find(&tokenizer).map_err(|e| e.to_string())?;
                Ok((words, tokenizer))
            }
            Resolved::Server { instead_of } => Err(instead_of),
        })
    });
    let local = local.await.map_err(|e| Failure::new(ErrorCode::Internal, e.to_string()))?;
    let instead_of = match local.map_err(failed)? {
        Ok((words, tokenizer)) => return Ok((words, Some(tokenizer))),
        Err(instead_of) => instead_of,
    };
    let runtime = tokio::runtime::Handle::current();
    let (asker, name) = (server.clone(), model.to_owned());
    let words = tokio::task::spawn_blocking(move || {
        Words::from_oracle(|texts| runtime.block_on(count_by_server(&asker, &name, texts)))
            .map_err(|e| e.to_string())
    });
    let words = words.await.map_err(|e| Failure::new(ErrorCode::Internal, e.to_string()))?;
    match (words, instead_of) {
        (Ok(words), instead_of) => {
            if let Some(error) = instead_of {
                notices.push(format!(
                    "the server's own tokenizer is used, since the model's cannot be loaded: {error}"
                ));
            }
            Ok((words, None))
        }
        (Err(why), Some(error)) => Err(failed(error.without_server(model, why).to_string())),
        (Err(why), None) => Err(failed(format!(
            "the server's tokenizer cannot be used: {why}; name a tokenizer.json, a Hugging Face name or builtin with \
             --tokenizer"
        ))),
    }
}

/// Tokens of each text, by the server's `/tokenize`.
async fn count_by_server(server: &Server, model: &str, texts: &[String]) -> Result<Vec<usize>, String> {
    let mut counts = Vec::with_capacity(texts.len());
    for text in texts {
        // vLLM reads `prompt`, llama.cpp `content`; each ignores the other's field.
        let body = json!({"model": model, "prompt": text, "content": text, "add_special_tokens": false});
        let answer = post(server, "/tokenize", &body).await;
        let answer = answer.map_err(|e| server.redact(&format!("/tokenize: {}", chain(&e.without_url()))))?;
        let answer =
            answer.map_err(|(status, text)| server.redact(&format!("/tokenize answers {status}: {text}")))?;
        let value: Value =
            serde_json::from_str(&answer).map_err(|e| format!("/tokenize gives no JSON: {e}"))?;
        let tokens = value["tokens"].as_array().ok_or("/tokenize gives no list of tokens")?;
        counts.push(tokens.len());
    }
    Ok(counts)
}

/// Finds the chat template's cost by requests of the plan's own shape.
struct Calibrator<'a> {
    server: &'a Server,
    plan: &'a Plan,
    probed: &'a Probed,
    words: &'a Words,
    /// A seed of its own, so that these texts stand at the beginning of no session.
    seed: u64,
    stop: &'a CancellationToken,
}

impl Calibrator<'_> {
    /// The cost of the first turn and of each later one; `None` without usage.
    async fn run(&self, spec: &Spec, into: &mut Preparation) -> Result<Option<TemplateCost>, Failure> {
        let with_system = spec.system_prompt_tokens > 0;
        let mut costs = Vec::new();
        // A second turn also tells what stands around a user message, which is not the system prompt's.
        let least = if with_system { 2 } else { 1 };
        for turns in 1..=spec.num_turns.clamp(least, 3) {
            let request = self.ask(turns, with_system).await?;
            let cost = match (request.prompt_tokens, request.content_tokens) {
                (Some(prompt), Some(content)) => Some(prompt.saturating_sub(content)),
                _ => None,
            };
            into.calibration.push(request);
            let Some(cost) = cost else { return Ok(None) };
            costs.push(cost);
        }
        let later: Vec<u32> = costs.windows(2).map(|w| w[1].saturating_sub(w[0])).collect();
        if later.windows(2).any(|w| w[0] != w[1]) {
            into.notices.push(format!(
                "the chat template costs {} tokens at turn 2 and {} at turn 3; later turns are corrected as they come",
                later[0], later[1]
            ));
        }
        Ok(costs.first().map(|first| TemplateCost {
            first_turn_tokens: *first,
            later_turn_tokens: later.last().copied().unwrap_or(0),
        }))
    }

    async fn ask(&self, turns: u32, with_system: bool) -> Result<CalibrationRequest, Failure> {
        let extra = &self.plan.target.extra_body;
        let mut body = self.probed.parameters.body_head(&self.probed.model, PROBE_TOKENS, extra);
        let number = u64::from(turns);
        let mut messages = 0;
        let mut message = |role: &str, body: &mut String| {
            if messages > 0 {
                body.push(',');
            }
            body.push_str(&format!(r#"{{"role":"{role}","content":""#));
            self.words.push_user(body, self.seed, number, messages + 1, CALIBRATION_TOKENS);
            body.push_str("\"}");
            messages += 1;
        };
        if with_system {
            message("system", &mut body);
        }
        for turn in 1..=turns {
            message("user", &mut body);
            if turn < turns {
                message("assistant", &mut body);
            }
        }
        body.push_str("]}");
        let seen = ask(self.server, body, "calibration", self.stop).await;
        // One token may well be one that shows nothing.
        if let Some(error) = &seen.error
            && seen.outcome != Outcome::Empty
        {
            return Err(Failure::new(
                ErrorCode::Server,
                format!(
                    "the server at {} refused a conversation of {turns} turns{} ({}): {error}",
                    self.server.root,
                    if with_system { " with a system prompt" } else { "" },
                    seen.outcome.name()
                ),
            ));
        }
        Ok(CalibrationRequest {
            purpose: "calibration".to_owned(),
            turns,
            with_system,
            content_tokens: Some(messages * CALIBRATION_TOKENS),
            // A prompt has tokens; a 0 is a server that does not count.
            prompt_tokens: seen.usage.and_then(|u| u.prompt_tokens).filter(|tokens| *tokens > 0),
            cached_tokens: seen.usage.and_then(|u| u.cached_tokens),
            status: status(seen.outcome),
        })
    }
}
