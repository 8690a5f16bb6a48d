//! What the server's own metrics say of the measured part and of the whole run, and whether its counters can be
//! compared with our requests at all: they count everybody's.

use proto::metric;
use proto::record::{Record, TokenSource};
use proto::report::{GaugeStats, ServerChange, ServerKind, ServerReport, ServerSample, ServerWindow};

use super::{Selection, mean};
use crate::engine::run_data::RunData;
use crate::engine::telemetry::{Reading, Telemetry};

/// How far the server's count of prompt tokens may be off ours, as a share; beyond, it has counted other requests.
const SAME_TOKENS: f64 = 0.01;
/// The same where not every answer told its tokens, and our own count leaves out the chat template.
const SAME_TOKENS_UNTOLD: f64 = 0.1;

type At = (i64, Reading);

/// The server's side of a run.
pub(super) fn report(data: &RunData, selection: &Selection<'_>) -> ServerReport {
    let telemetry = &data.telemetry;
    let readings = &telemetry.readings;
    let told = || data.records.iter().filter(|r| r.input_tokens_source == Some(TokenSource::Usage));
    let cached: Vec<u64> = told().filter_map(|r| r.cached_tokens).map(u64::from).collect();
    ServerReport {
        metrics_url: telemetry.url.clone(),
        kind: readings.first().map(|(_, reading)| reading.kind),
        missing: telemetry.missing.clone(),
        scrapes: readings.len() as u64,
        failed_scrapes: telemetry.failed,
        last_failure: telemetry.last_failure.clone(),
        window: window(data, selection),
        whole_run: whole(telemetry).map(|(first, last)| change(first, last)),
        own_prompt_tokens: told().filter_map(|r| r.input_tokens).map(u64::from).sum(),
        own_cached_tokens: (!cached.is_empty()).then(|| cached.iter().sum()),
    }
}

/// The readings as they are saved.
pub(super) fn samples(telemetry: &Telemetry) -> Vec<ServerSample> {
    let sample = |(at_ns, r): &At| ServerSample {
        at_ms: metric::ms(*at_ns),
        running: r.running,
        waiting: r.waiting,
        kv_cache_usage: r.kv_cache_usage,
        prompt_tokens: r.prompt_tokens,
        generation_tokens: r.generation_tokens,
        cache_queries: r.cache_queries,
        cache_hits: r.cache_hits,
        ttft_count: r.ttft_count,
        ttft_sum_s: r.ttft_sum_s,
    };
    telemetry.readings.iter().map(sample).collect()
}

/// From before the first request to after the last answer.
fn whole(telemetry: &Telemetry) -> Option<(&At, &At)> {
    let (first, last) = (telemetry.readings.first()?, telemetry.readings.last()?);
    telemetry.is_whole.then_some((first, last))
}

/// From the first scrape at or after the start of the measured part to the first after its last request completed.
fn window(data: &RunData, selection: &Selection<'_>) -> Option<ServerWindow> {
    let readings = &data.telemetry.readings;
    let completed = selection.records.iter().filter_map(|r| r.completed_ns).max();
    let is_from = |at: &At| selection.is_all || at.0 >= selection.from_ns;
    let first = readings.iter().position(is_from)?;
    let last = readings.iter().position(|at| at.0 >= completed.unwrap_or(selection.to_ns))?;
    if last <= first {
        return None;
    }
    let inside = &readings[first..=last];
    let (from_ns, to_ns) = (readings[first].0, readings[last].0);
    let gauge = |of: fn(&Reading) -> Option<f64>| {
        let values = || inside.iter().filter_map(|(_, reading)| of(reading));
        GaugeStats { mean: mean(values()), max: values().max_by(f64::total_cmp) }
    };
    let answered = || {
        let inside = |r: &&Record| r.first_token_ns.is_some_and(|at| (from_ns..to_ns).contains(&at));
        data.records.iter().filter(inside).filter_map(metric::ttft_ms)
    };
    Some(ServerWindow {
        change: change(&readings[first], &readings[last]),
        samples: inside.len() as u64,
        running: gauge(|r| r.running),
        waiting: gauge(|r| r.waiting),
        kv_cache_usage: gauge(|r| r.kv_cache_usage),
        client_ttft_count: answered().count() as u64,
        client_avg_ttft_ms: mean(answered()),
    })
}

fn change((from_ns, first): &At, (to_ns, last): &At) -> ServerChange {
    let mut first = *first;
    last.started_as(&mut first);
    let counted = |of: fn(&Reading) -> Option<u64>| of(last)?.checked_sub(of(&first)?);
    let ttft_count = counted(|r| r.ttft_count);
    let ttft_s = last.ttft_sum_s.zip(first.ttft_sum_s).map(|(last, first)| last - first);
    ServerChange {
        from_ms: metric::ms(*from_ns),
        to_ms: metric::ms(*to_ns),
        prompt_tokens: counted(|r| r.prompt_tokens),
        generation_tokens: counted(|r| r.generation_tokens),
        cache_queries: counted(|r| r.cache_queries),
        cache_hits: counted(|r| r.cache_hits),
        ttft_count,
        avg_ttft_ms: ttft_count
            .filter(|count| *count > 0)
            .zip(ttft_s)
            .map(|(count, seconds)| seconds * 1e3 / count as f64),
    }
}

/// Whether the counters say what the server's cache held of the measured requests; `Err`: why not.
pub(super) fn counted_missing(data: &RunData, report: &ServerReport) -> Result<(), String> {
    let telemetry = &data.telemetry;
    if let Some(why) = &report.missing {
        return Err(why.clone());
    }
    let Some(whole) = &report.whole_run else {
        let why = telemetry.last_failure.as_deref().unwrap_or("it was not made");
        return Err(format!("the scrape after the last answer failed: {why}"));
    };
    let went_back = |of: fn(&Reading) -> Option<u64>| {
        let values: Vec<u64> = telemetry.readings.iter().filter_map(|(_, reading)| of(reading)).collect();
        values.windows(2).any(|pair| pair[1] < pair[0])
    };
    if went_back(|r| r.cache_queries) || went_back(|r| r.cache_hits) {
        return Err("the server's counters went back: it was restarted during the run".to_owned());
    }
    let (Some(queries), Some(_)) = (whole.cache_queries, whole.cache_hits) else {
        return Err(format!("the server's metrics have no {}", counters(report.kind)));
    };
    let (fewest, most) = own_tokens(data);
    let counted = queries as f64;
    if counted > most || counted < fewest {
        let whose = if counted > most { "others used it too" } else { "they leave out a part of it" };
        return Err(format!(
            "the server's counters are not of this run alone: they count {queries} prompt tokens in it, and it sent {}; \
             {whose}",
            report.own_prompt_tokens
        ));
    }
    match report.window.as_ref().map(|window| window.change.cache_queries) {
        None => Err("no two scrapes fell into the measured part, which was too short".to_owned()),
        Some(None | Some(0)) => Err("the server counted no prompt in the measured part".to_owned()),
        Some(Some(_)) => Ok(()),
    }
}

fn counters(kind: Option<ServerKind>) -> &'static str {
    match kind {
        Some(ServerKind::Vllm) | None => "vllm:prefix_cache_queries_total and vllm:prefix_cache_hits_total",
        Some(ServerKind::Sglang) => "sglang:prompt_tokens_total and sglang:cached_tokens_total",
        Some(ServerKind::Llamacpp) => "llamacpp:prompt_tokens_cached_total",
    }
}

/// Prompt tokens that a server may have counted of our requests: those of the answers at least, and at most those of
/// all that was sent, where a request that failed may or may not have come as far as the cache.
fn own_tokens(data: &RunData) -> (f64, f64) {
    let sent = || data.records.iter().filter(|r| r.sent_ns.is_some());
    let is_told = |r: &Record| r.input_tokens_source == Some(TokenSource::Usage);
    let tokens = |r: &Record| f64::from(r.input_tokens.or(r.planned_input_tokens).unwrap_or(0));
    let answered: f64 = sent().filter(|r| r.outcome.is_ok()).map(tokens).sum();
    let all: f64 = sent().map(|r| tokens(r) * if r.resent { 2.0 } else { 1.0 }).sum();
    let all_told = sent().filter(|r| r.outcome.is_ok()).all(is_told);
    let slack = if all_told { SAME_TOKENS } else { SAME_TOKENS_UNTOLD };
    (answered * (1.0 - slack), all * (1.0 + slack))
}
