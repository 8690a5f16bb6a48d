//! The solved workload: what the inputs of a [`crate::plan::Workload`] come to, turn by turn. Made by the
//! engine's solver, printed with every report and by `benchctl plan`.

use serde::{Deserialize, Serialize};

/// Tokens of every turn, the inputs that they come from, and what could have been asked instead.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Average input tokens asked for.
    pub isl: u32,
    /// Output tokens of each turn.
    pub osl: u32,
    /// Hit rate aimed at: the given one, else the one that history alone gives.
    pub hit_rate: f64,
    /// Whether the hit rate was given.
    pub hit_rate_given: bool,
    /// Turns of a session.
    pub num_turns: u32,
    /// Shared share of the system prompt in use.
    pub shared_system_prompt_ratio: f64,
    /// Whether that share was given; a given one is never changed.
    pub shared_system_prompt_ratio_given: bool,
    /// Seconds between an answer and the next turn.
    pub think_time_s: f64,
    /// Tokens in a cache block, for `cached_by_blocks`.
    pub block_size: u32,
    /// u: new user tokens of each turn, the template's cost of a later turn included.
    pub user_tokens_per_turn: u32,
    /// s: tokens before the first user message: the system prompt and the template around it.
    pub system_prompt_tokens: u32,
    /// Tokens of s that are the same in all sessions.
    pub shared_system_prompt: u32,
    /// Tokens of s that are the session's own.
    pub unique_system_prompt: u32,
    /// Average input tokens of the whole numbers above.
    pub effective_isl: f64,
    /// Token-weighted hit rate of the whole numbers above, for a cache that keeps single tokens.
    pub effective_hit_rate: f64,
    /// The same for a cache that keeps whole blocks.
    pub effective_hit_rate_by_blocks: f64,
    /// Hit rates that are feasible with the other inputs as they are: with the shared share if it was given, else with
    /// any.
    pub feasible_hit_rate: Range,
    /// Shared shares that are feasible with the other inputs as they are.
    pub feasible_shared_system_prompt_ratio: Range,
    /// Each turn's tokens; turn 1 first.
    pub per_turn: Vec<SpecTurn>,
    /// What the solver changed or rounded that a reader should know, a sentence each.
    pub notices: Vec<String>,
}

/// A closed interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Range {
    /// Lowest feasible value.
    pub min: f64,
    /// Highest feasible value.
    pub max: f64,
}

/// One turn's prompt, in tokens as the server counts them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpecTurn {
    /// From 1.
    pub turn: u32,
    /// Prompt tokens.
    pub total: u32,
    /// Of these, tokens that an ideal cache holds.
    pub cached: u32,
    /// Of these, tokens that it does not.
    pub new: u32,
    /// cached / total.
    pub hit_rate: f64,
    /// Of these, tokens that a cache of whole blocks holds: `cached` without the last token of the last reply, of
    /// which servers keep no state, cut to whole blocks.
    pub cached_by_blocks: u32,
}

/// What the server's chat template adds, found by calibration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateCost {
    /// Tokens around the messages of the first turn.
    pub first_turn_tokens: u32,
    /// Tokens that each later turn adds beside its reply and its user message.
    pub later_turn_tokens: u32,
}
