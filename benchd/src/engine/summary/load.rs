//! The load asked for beside the load achieved.

use std::collections::BTreeMap;

use proto::metric::Dist;
use proto::plan::Load;
use proto::record::{Outcome, Record, TokenSource};
use proto::report::{LoadReport, TurnShare, WaitDist};

use super::flight::Flight;
use super::{Selection, mean, share};
use crate::engine::run_data::RunData;

/// The load of a run.
pub(super) fn report(data: &RunData, selection: &Selection<'_>, flight: &Flight) -> LoadReport {
    let counts = &data.counts;
    let sent: Vec<&Record> = selection.sent().collect();
    let prompts = Prompts::of(&sent);
    let all_sent = || data.records.iter().filter(|r| r.sent_ns.is_some());
    let sent_inside = all_sent().filter(|r| r.sent_ns.is_some_and(|at| selection.holds(at))).count();
    let waits = Dist::of(counts.ready_waits_ms.clone());
    LoadReport {
        planned_slots: counts.planned_slots,
        sent: all_sent().count() as u64,
        refused: data.records.iter().filter(|r| r.outcome == Outcome::Refused).count() as u64,
        unsent: counts.unsent,
        unanswered: sent.iter().filter(|r| r.outcome == Outcome::Aborted).count() as u64,
        asked_rate_per_s: match &data.config.load {
            Load::Open { request_rate_per_s, .. } => Some(*request_rate_per_s),
            Load::Closed { .. } => None,
        },
        planned_rate_per_s: if selection.is_all {
            None
        } else {
            counts.planned_slots_measured.and_then(|slots| selection.per_second(slots as f64))
        },
        sent_rate_per_s: selection.per_second(sent_inside as f64),
        planned_isl: mean(sent.iter().filter_map(|r| r.planned_input_tokens).map(f64::from)),
        achieved_isl: mean(sent.iter().filter_map(|r| r.input_tokens).map(f64::from)),
        planned_osl: f64::from(data.spec.osl),
        achieved_osl: mean(selection.successes().filter_map(|r| r.output_tokens).map(f64::from)),
        exact_prompts: prompts.exact,
        residuals: prompts.residuals,
        uncounted_prompts: prompts.uncounted,
        turn_mix: turn_mix(data.spec.num_turns, &sent),
        sessions_started: counts.sessions_started,
        sessions_completed: counts.sessions_completed,
        sessions_failed: counts.sessions_failed,
        sessions_beyond_plan: counts.beyond_plan_measured,
        sessions_cut_short: counts.cut_short_measured,
        ready_wait_ms: WaitDist { count: waits.count, avg: waits.avg, p99: waits.p99 },
        mean_in_flight: flight.mean,
        peak_in_flight: flight.peak,
        in_flight_growth_per_s: flight.growth_per_s,
        prompt_supply_dry: counts.prompt_supply_dry,
        new_connections: sent.iter().filter(|r| r.new_connection).count() as u64,
        resent: data.records.iter().filter(|r| r.resent).count() as u64,
    }
}

/// Prompt lengths of the requests that were sent.
#[derive(Default)]
struct Prompts {
    exact: u64,
    residuals: BTreeMap<i64, u64>,
    uncounted: u64,
}

impl Prompts {
    fn of(sent: &[&Record]) -> Self {
        let mut prompts = Prompts::default();
        for record in sent {
            // Our own count would confirm itself.
            let counted =
                record.input_tokens.filter(|_| record.input_tokens_source == Some(TokenSource::Usage));
            match (counted, record.planned_input_tokens) {
                (Some(counted), Some(planned)) if counted == planned => prompts.exact += 1,
                (Some(counted), Some(planned)) => {
                    *prompts.residuals.entry(i64::from(counted) - i64::from(planned)).or_default() += 1;
                }
                _ => prompts.uncounted += 1,
            }
        }
        prompts
    }
}

fn turn_mix(num_turns: u32, sent: &[&Record]) -> Vec<TurnShare> {
    let mut by_turn = vec![0u64; num_turns as usize];
    for turn in sent.iter().filter_map(|r| r.turn) {
        if let Some(count) = (turn as usize).checked_sub(1).and_then(|index| by_turn.get_mut(index)) {
            *count += 1;
        }
    }
    let total: u64 = by_turn.iter().sum();
    (1..)
        .zip(by_turn)
        .map(|(turn, sent)| TurnShare {
            turn,
            sent,
            planned: 1.0 / f64::from(num_turns),
            achieved: share(sent as f64, total as f64),
        })
        .collect()
}
