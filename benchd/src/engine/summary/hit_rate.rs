//! Token-weighted hit rates: of the plan, of the replies as they came, as the server reports them, and as it counted.

use proto::record::{Record, TokenSource};
use proto::report::{HitRates, ServerChange, ServerReport};

use super::{Selection, server, share};
use crate::engine::run_data::RunData;

/// Why a server that sends usage reports no hit rate.
const NOT_TOLD: &str = "the server's usage has no prompt_tokens_details.cached_tokens";
/// Why nothing of it is known.
const NO_USAGE: &str = "no answer carried usage";

/// The hit rates of a selection.
pub(super) fn rates(data: &RunData, selection: &Selection<'_>, server: &ServerReport) -> HitRates {
    let planned = |cached: fn(&proto::spec::SpecTurn) -> u32| {
        let turns = selection.sent().filter_map(|r| data.spec.per_turn.get(r.turn?.checked_sub(1)? as usize));
        let (cached, total) =
            turns.fold((0u64, 0u64), |(c, t), turn| (c + u64::from(cached(turn)), t + u64::from(turn.total)));
        share(cached as f64, total as f64)
    };
    let expected =
        ratio(selection.successes().filter_map(|r| Some((r.expected_cached_tokens?, r.input_tokens?))));
    let block = data.spec.block_size;
    let by_blocks = ratio(selection.successes().filter_map(|r| {
        // Of the last token of the reply before, servers keep no state.
        let held = r.expected_cached_tokens?.saturating_sub(u32::from(r.turn? > 1));
        Some((held - held % block, r.input_tokens?))
    }));
    let of_usage = |r: &&Record| r.input_tokens_source == Some(TokenSource::Usage);
    let reported: Vec<(u32, u32)> = selection
        .successes()
        .filter(of_usage)
        .filter_map(|r| Some((r.cached_tokens?, r.input_tokens?)))
        .collect();
    let has_usage = selection.successes().any(|r| of_usage(&r));
    let counted_missing = server::counted_missing(data, server).err();
    let counted = server.window.as_ref().map(|w| &w.change).filter(|_| counted_missing.is_none());
    let whole_run = server.whole_run.as_ref().filter(|_| counted_missing.is_none());
    HitRates {
        planned: planned(|turn| turn.cached),
        planned_by_blocks: planned(|turn| turn.cached_by_blocks),
        expected,
        expected_by_blocks: by_blocks,
        reported: ratio(reported.iter().copied()),
        reported_missing: reported
            .is_empty()
            .then(|| if has_usage { NOT_TOLD.to_owned() } else { NO_USAGE.to_owned() }),
        reported_requests: reported.len() as u64,
        first_turn_unexpected: first_turn_unexpected(data, selection),
        counted: counted.and_then(found),
        counted_from_ms: counted.map(|change| change.from_ms),
        counted_to_ms: counted.map(|change| change.to_ms),
        counted_whole_run: whole_run.and_then(found),
        reported_whole_run: server
            .own_cached_tokens
            .and_then(|cached| share(cached as f64, server.own_prompt_tokens as f64)),
        counted_missing,
    }
}

/// Of what was looked up in the cache, what was found.
fn found(change: &ServerChange) -> Option<f64> {
    share(change.cache_hits? as f64, change.cache_queries? as f64)
}

fn ratio(parts: impl Iterator<Item = (u32, u32)>) -> Option<f64> {
    let (cached, total) =
        parts.fold((0u64, 0u64), |(c, t), (cached, total)| (c + u64::from(cached), t + u64::from(total)));
    share(cached as f64, total as f64)
}

/// Cached tokens of first turns that no prompt of this run can have left there.
fn first_turn_unexpected(data: &RunData, selection: &Selection<'_>) -> Option<f64> {
    // What the template puts before the first message is the same in every request.
    let template = data.preparation.template.map_or(0, |t| t.first_turn_tokens);
    let explained = data.spec.shared_system_prompt.saturating_add(template);
    ratio(
        selection
            .successes()
            .filter(|r| r.turn == Some(1))
            .filter_map(|r| Some((r.cached_tokens?.saturating_sub(explained), r.input_tokens?))),
    )
}
