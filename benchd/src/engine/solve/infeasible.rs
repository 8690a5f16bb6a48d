//! Why a workload cannot be had, and the nearest that can.

use std::fmt;

/// No whole numbers u ≥ 1 and s ≥ 0 give what was asked; says why, and the nearest that works.
#[derive(Clone, Debug, PartialEq)]
pub struct Infeasible {
    /// The derived value that breaks.
    pub cause: Cause,
    /// What works instead.
    pub ways_out: WaysOut,
}

/// Why a workload is infeasible.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Cause {
    /// A field is outside its own bounds.
    #[error("{sentence}")]
    OutOfBounds {
        /// Field, bound and value.
        sentence: String,
    },
    /// The replies in the history alone leave no room for user messages.
    #[error(
        "with no system prompt at all u = {user_tokens:.1} user tokens a turn, below 1: {num_turns} turns of {osl} \
         output tokens bring an average of {history} tokens of replies into the prompt, of an ISL of {isl}"
    )]
    HistoryTooLong {
        /// u with s = 0.
        user_tokens: f64,
        /// Average tokens of earlier replies in a prompt.
        history: f64,
        /// As asked.
        isl: u32,
        /// As asked.
        osl: u32,
        /// As asked.
        num_turns: u32,
    },
    /// Too few new tokens are left for user messages.
    #[error("u = {user_tokens:.1} user tokens a turn, below 1: a hit rate of {hit_rate} is too high {}", at_ratio(*ratio))]
    HitRateTooHigh {
        /// u at that share.
        user_tokens: f64,
        /// As asked.
        hit_rate: f64,
        /// Shared share as given; absent: even 1 is not enough.
        ratio: Option<f64>,
    },
    /// One turn and no shared system prompt.
    #[error(
        "a session of one turn has no history, and with a shared system prompt ratio of 0 nothing can be cached: the \
         hit rate can only be 0, not {hit_rate}"
    )]
    NothingToHit {
        /// As asked.
        hit_rate: f64,
    },
    /// Every earlier turn is cached, so the hit rate cannot be that low.
    #[error(
        "s = {system_tokens:.1} system prompt tokens, below 0: a hit rate of {hit_rate} is too low, because the \
         history is always cached"
    )]
    HitRateTooLow {
        /// s that the equations give.
        system_tokens: f64,
        /// As asked.
        hit_rate: f64,
    },
}

fn at_ratio(ratio: Option<f64>) -> String {
    match ratio {
        Some(f) => format!("with a shared system prompt ratio of {f}"),
        None => "even with the whole system prompt shared".to_owned(),
    }
}

/// For each parameter alone, the others as they are: the nearest value with which the workload solves; absent: none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WaysOut {
    /// Average input tokens.
    pub isl: Option<u32>,
    /// Output tokens.
    pub osl: Option<u32>,
    /// Hit rate, rounded to 0.0001 where that is feasible.
    pub hit_rate: Option<f64>,
    /// Turns.
    pub num_turns: Option<u32>,
    /// Shared share of the system prompt, rounded up to 0.0001.
    pub shared_system_prompt_ratio: Option<f64>,
}

impl std::error::Error for Infeasible {}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Cause::OutOfBounds { sentence } = &self.cause {
            return f.write_str(sentence);
        }
        let WaysOut { isl, osl, hit_rate, num_turns, shared_system_prompt_ratio } = self.ways_out;
        let all = [
            ("isl", isl.map(|v| v.to_string())),
            ("osl", osl.map(|v| v.to_string())),
            ("hit rate", hit_rate.map(|v| v.to_string())),
            ("turns", num_turns.map(|v| v.to_string())),
            ("shared system prompt ratio", shared_system_prompt_ratio.map(|v| v.to_string())),
        ];
        let named = |(name, value): &(&str, Option<String>)| value.as_ref().map(|v| format!("{name} {v}"));
        let works: Vec<String> = all.iter().filter_map(named).collect();
        let fails: Vec<&str> = all.iter().filter(|(_, v)| v.is_none()).map(|(name, _)| *name).collect();
        write!(f, "infeasible workload: {}; ", self.cause)?;
        if works.is_empty() {
            return f.write_str("no change of one parameter alone helps");
        }
        write!(f, "the nearest that works, changing one alone: {}", works.join(", or "))?;
        if fails.is_empty() { Ok(()) } else { write!(f, " (no value helps of: {})", fails.join(", ")) }
    }
}
