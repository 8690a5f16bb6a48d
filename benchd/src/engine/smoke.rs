//! The smoke test: one small request, and what the server can do.

use proto::plan::Target;
use proto::report::SmokeReport;
use proto::wire::{Failure, Secrets};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::engine::probe::{post, probe};
use crate::engine::server::Server;
use crate::engine::telemetry::Scraper;

/// Output tokens of the request.
const OUTPUT_TOKENS: u32 = 16;
/// Time for its metrics.
const METRICS_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(3);
/// Characters of the reply that are shown.
const SHOWN_CHARS: usize = 200;

/// Asks the server one thing, and looks at what else it offers.
pub async fn smoke(
    target: &Target,
    secrets: &Secrets,
    stop: &CancellationToken,
) -> Result<SmokeReport, Failure> {
    let server = Server::new(target, secrets)?;
    let ready_timeout = std::time::Duration::from_secs_f64(target.ready_timeout_s);
    let wanted = target.model.as_deref();
    let probed = probe(&server, wanted, &target.extra_body, ready_timeout, OUTPUT_TOKENS, stop).await?;
    let has_metrics = match Scraper::new(target, &server)? {
        Some(scraper) => scraper.scrape(METRICS_TIMEOUT).await.is_ok(),
        None => false,
    };
    let question = json!({"model": probed.model, "prompt": "hello", "content": "hello"});
    let has_tokenize =
        matches!(post(&server, "/tokenize", &question).await, Ok(Ok(text)) if text.contains("tokens"));
    let seen = probed.answer;
    let since_sent = |at: Option<i64>| at.map(|ns| proto::metric::ms(ns - seen.sent_ns));
    let usage = seen.usage.unwrap_or_default();
    let reply = if seen.text.answer.is_empty() { &seen.text.other } else { &seen.text.answer };
    Ok(SmokeReport {
        url: server.root.clone(),
        model: probed.model,
        models: probed.models,
        ttft_ms: since_sent(seen.first_token_ns),
        latency_ms: since_sent(seen.last_token_ns),
        input_tokens: usage.prompt_tokens,
        output_tokens: usage.completion_tokens.or((seen.events > 0).then_some(seen.events)),
        reply: reply.chars().take(SHOWN_CHARS).collect(),
        has_usage: usage.prompt_tokens.is_some(),
        has_cached_tokens: usage.cached_tokens.is_some(),
        has_metrics,
        has_tokenize,
        dropped_parameters: probed.dropped,
    })
}
