//! Runs made by hand, and what their reports must say of them: here the runs, beside it their figures and verdicts.

mod figures;
mod server;
mod steadiness;
mod verdicts;

use proto::gaps::Gaps;
use proto::plan::{Arrival, Load};
use proto::record::{Outcome, Phases, Record, RowContext, TokenSource};
use proto::report::{Config, Environment, Preparation};
use proto::spec::{Range, Spec, SpecTurn, TemplateCost};

use crate::engine::run_data::{RunData, ScheduleCounts};
use crate::engine::telemetry::Telemetry;
use crate::engine::watch::Watched;

const MS: i64 = 1_000_000;
const S: i64 = 1000 * MS;

/// Two turns of 100 and 200 tokens, of which 40 and 110 are cached: half of them, 128 of 300 by blocks.
fn spec() -> Spec {
    let turn = |turn, total, cached, cached_by_blocks| SpecTurn {
        turn,
        total,
        cached,
        new: total - cached,
        hit_rate: f64::from(cached) / f64::from(total),
        cached_by_blocks,
    };
    Spec {
        isl: 150,
        osl: 10,
        hit_rate: 0.5,
        hit_rate_given: true,
        num_turns: 2,
        shared_system_prompt_ratio: 0.8,
        shared_system_prompt_ratio_given: true,
        think_time_s: 0.0,
        block_size: 16,
        user_tokens_per_turn: 90,
        system_prompt_tokens: 50,
        shared_system_prompt: 40,
        unique_system_prompt: 10,
        effective_isl: 150.0,
        effective_hit_rate: 0.5,
        effective_hit_rate_by_blocks: 128.0 / 300.0,
        feasible_hit_rate: Range { min: 0.0, max: 0.9 },
        feasible_shared_system_prompt_ratio: Range { min: 0.0, max: 1.0 },
        per_turn: vec![turn(1, 100, 40, 32), turn(2, 200, 110, 96)],
        notices: vec![],
    }
}

fn open_loop(request_rate_per_s: f64) -> Load {
    Load::Open {
        request_rate_per_s,
        duration_s: 40.0,
        warm_up_s: 0.0,
        arrival: Arrival::Constant,
        max_concurrency: None,
        max_in_flight: 10_000,
        drain_timeout_s: 60.0,
    }
}

fn closed_loop() -> Load {
    Load::Closed {
        concurrency: 2,
        num_sessions: Some(10),
        duration_s: None,
        num_requests: None,
        ramp_interval_s: None,
        warmup_jitter_max_s: 0.0,
        drain_timeout_s: 60.0,
    }
}

/// A closed loop that measured from 1 s to 3 s.
fn run(records: Vec<Record>) -> RunData {
    let phases = Phases { measured_from_ns: S, measured_to_ns: 3 * S };
    RunData {
        config: Config {
            url: "http://localhost:8000".into(),
            model: "m".into(),
            tokenizer: "builtin".into(),
            tokenizer_sha256: None,
            load: closed_loop(),
            seed: 1,
            request_timeout_s: 300.0,
            extra_body: serde_json::Map::new(),
        },
        spec: spec(),
        first_chunk_threshold: 3,
        records,
        phases,
        ended_ns: 4 * S,
        counts: ScheduleCounts::default(),
        steady_state_reached: Some(true),
        last_turn_sent_in_warm_up: None,
        is_partial: false,
        error_limit_reached: false,
        watched: Watched::default(),
        preparation: Preparation {
            template: Some(TemplateCost { first_turn_tokens: 3, later_turn_tokens: 2 }),
            ..Preparation::default()
        },
        telemetry: Telemetry::default(),
        environment: Environment {
            benchd_version: "0".into(),
            protocol_version: 1,
            host: "h".into(),
            os: "o".into(),
            cpus: 2,
            command_line: vec![],
            seed: 1,
            plan_hash: "p".into(),
            started_at_epoch_s: 0.0,
            origin_monotonic_ns: 0,
        },
        row_context: RowContext {
            phases,
            session_prefix: "s".into(),
            origin_epoch_ms: 0.0,
            save_events: false,
        },
    }
}

/// A turn that went as planned: sent when due, first token after 100 ms, nine more every 10 ms.
fn answered(turn: u32, due_ns: i64) -> Record {
    let planned = &spec().per_turn[turn as usize - 1];
    let record = Record {
        session: Some(0),
        turn: Some(turn),
        due_ns,
        cap_wait_ns: 0,
        sent_ns: Some(due_ns),
        first_token_ns: None,
        first_answer_ns: None,
        first_chunk_ns: None,
        last_token_ns: None,
        completed_ns: None,
        events: 0,
        reads: 0,
        is_whole: false,
        gaps: Gaps::default(),
        event_tokens: None,
        outcome: Outcome::Ok,
        error: None,
        finish_reason: None,
        planned_input_tokens: Some(planned.total),
        input_tokens: Some(planned.total),
        input_tokens_source: Some(TokenSource::Usage),
        output_tokens: None,
        output_tokens_source: Some(TokenSource::Usage),
        reasoning_tokens: None,
        cached_tokens: Some(planned.cached),
        expected_cached_tokens: Some(planned.cached),
        reply_tokens: None,
        new_connection: false,
        resent: false,
    };
    with_events(record, due_ns + 100 * MS, &[10; 9])
}

/// The same with another reply: its first event, and the gaps after it in ms.
fn with_events(mut record: Record, first_ns: i64, gaps_ms: &[i64]) -> Record {
    let arrivals: Vec<i64> = std::iter::once(0)
        .chain(gaps_ms.iter().scan(0, |at, gap| {
            *at += gap * MS;
            Some(*at)
        }))
        .map(|after| first_ns + after)
        .collect();
    record.gaps = Gaps::default();
    for gap in gaps_ms {
        record.gaps.push((gap * MS).unsigned_abs());
    }
    record.events = u32::try_from(arrivals.len()).unwrap();
    record.reads = record.events;
    record.output_tokens = Some(record.events);
    record.first_token_ns = Some(first_ns);
    record.first_answer_ns = Some(first_ns);
    record.first_chunk_ns = arrivals.get(2).copied();
    record.last_token_ns = arrivals.last().copied();
    record.completed_ns = record.last_token_ns;
    record
}

/// A turn that failed 50 ms after it was sent, before any token.
fn failed(turn: u32, due_ns: i64, outcome: Outcome, error: &str) -> Record {
    Record {
        outcome,
        error: Some(error.into()),
        completed_ns: Some(due_ns + 50 * MS),
        ..without_answer(answered(turn, due_ns))
    }
}

fn aborted(turn: u32, due_ns: i64) -> Record {
    Record { outcome: Outcome::Aborted, ..without_answer(answered(turn, due_ns)) }
}

fn refused(due_ns: i64) -> Record {
    Record {
        session: None,
        turn: None,
        sent_ns: None,
        planned_input_tokens: None,
        outcome: Outcome::Refused,
        ..without_answer(answered(1, due_ns))
    }
}

fn without_answer(record: Record) -> Record {
    Record {
        first_token_ns: None,
        first_answer_ns: None,
        first_chunk_ns: None,
        last_token_ns: None,
        completed_ns: None,
        events: 0,
        reads: 0,
        gaps: Gaps::default(),
        input_tokens: None,
        input_tokens_source: None,
        output_tokens: None,
        output_tokens_source: None,
        cached_tokens: None,
        expected_cached_tokens: None,
        ..record
    }
}
