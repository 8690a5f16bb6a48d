//! Everything that a finished run hands to the summary: the records, and what the schedule alone knows.

use proto::record::{Phases, Record};
use proto::report::{Config, Environment, Preparation};
use proto::spec::Spec;

use crate::engine::telemetry::Telemetry;
use crate::engine::watch::Watched;

/// A finished (or stopped) run.
#[derive(Debug)]
pub struct RunData {
    /// Configuration, defaults resolved; holds the load.
    pub config: Config,
    /// The solved workload.
    pub spec: Spec,
    /// Content events before the first-chunk latency is taken.
    pub first_chunk_threshold: u32,
    /// One for each slot or turn, whatever became of it.
    pub records: Vec<Record>,
    /// Where the phases lie. `measured_from_ns` is `i64::MAX` when steady state was never reached.
    pub phases: Phases,
    /// When the last exchange had ended, in ns of the run's clock.
    pub ended_ns: i64,
    /// What the schedule counted.
    pub counts: ScheduleCounts,
    /// Closed loop: whether warm-up ended by the rule.
    pub steady_state_reached: Option<bool>,
    /// Open loop: whether some turn n (the last) was sent before the warm-up ended.
    pub last_turn_sent_in_warm_up: Option<bool>,
    /// Whether the run was stopped before its end.
    pub is_partial: bool,
    /// Whether it was stopped because more requests failed than the plan allows.
    pub error_limit_reached: bool,
    /// What was seen of ourselves under load.
    pub watched: Watched,
    /// What was found out before the load.
    pub preparation: Preparation,
    /// What the server's own metrics said.
    pub telemetry: Telemetry,
    /// Where and by what.
    pub environment: Environment,
    /// The run's origin in ms of the Unix epoch, and the session id prefix, for rows.
    pub row_context: proto::record::RowContext,
}

/// Counts that only the schedule can make.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScheduleCounts {
    /// Open loop: slots of the drawn schedule, whole run (up to the stop, when stopped).
    pub planned_slots: Option<u64>,
    /// Open loop: of these, due in the measured part.
    pub planned_slots_measured: Option<u64>,
    /// Slots that still waited for a place when the run ended.
    pub unsent: u64,
    /// Sessions started.
    pub sessions_started: u64,
    /// Sessions that ran to their last turn (a cut first generation: to their cut).
    pub sessions_completed: u64,
    /// Sessions that ended with a failed turn.
    pub sessions_failed: u64,
    /// Sessions started in the measured part because no ready turn was there, and not paid back since by starting
    /// fewer: starts over one in n slots.
    pub beyond_plan_measured: u64,
    /// Sessions ended in the measured part because too many waited for the same turn.
    pub cut_short_measured: u64,
    /// Open loop: for each turn after the first sent in the measured part, ms between ready and its slot.
    pub ready_waits_ms: Vec<f64>,
    /// Turns that waited for a prompt that was not made in time.
    pub prompt_supply_dry: u64,
}
