//! From a workload in the user's terms to whole tokens: u user tokens a turn and s system prompt tokens, turn by
//! turn. Takes a [`Workload`], gives a [`Spec`] or says what could be asked instead. Pure and bounded: no search is
//! longer than the number of turns that a plan may have.

use proto::plan::{MAX_TOKENS, MAX_TURNS, Workload};
use proto::spec::{Range, Spec, SpecTurn, TemplateCost};
use std::fmt;

/// User tokens under which a shared share that was not given is raised further, so that a message says something.
const LEAST_USER_TOKENS: f64 = 32.0;
/// The same as a share of the ISL.
const LEAST_USER_SHARE: f64 = 0.01;
/// Tokens by which a bound may be missed: the arithmetic's own error, far below any effect on whole tokens.
const TOLERANCE: f64 = 1e-6;
/// Distance between the asked and the whole-number hit rate that deserves a notice.
const NOTABLE_HIT_RATE_ERROR: f64 = 0.005;

/// Solves the two equations
///
/// ```text
/// isl         = s + u·(n+1)/2 + osl·(n−1)/2
/// (1−h)·isl   = (1−f)·s/n + u
/// ```
///
/// for u and s, tries both whole numbers beside u with the s that keeps the ISL (off by at most 0.5), and keeps the
/// pair whose hit rate is nearer to h.
///
/// The hit rate is then off by at most half a token: `|effective_hit_rate − h|·isl ≤ 0.5`. The exception is a given
/// shared share together with many turns and almost no system prompt, where the upper neighbour of u would make s
/// negative: below 1 token there (isl 1424, osl 1, h 0.9985978, n 950, f 1: 0.997).
///
/// # Errors
/// [`Infeasible`] when no whole numbers with u ≥ 1 and s ≥ 0 come near, or when a field is out of its bounds.
pub fn solve(workload: &Workload) -> Result<Spec, Infeasible> {
    workload.validate().map_err(|sentence| Infeasible {
        cause: Cause::OutOfBounds { sentence },
        ways_out: WaysOut::default(),
    })?;
    let problem = Problem::of(workload);
    if let Some(cause) = problem.cause() {
        return Err(Infeasible { cause, ways_out: problem.ways_out() });
    }
    let ratio = problem.chosen_ratio();
    let hit_rate = problem.hit_rate();
    let whole = problem.nearest_whole(ratio);
    Ok(Spec {
        isl: workload.isl,
        osl: workload.osl,
        hit_rate,
        hit_rate_given: workload.hit_rate.is_some(),
        num_turns: workload.num_turns,
        shared_system_prompt_ratio: ratio,
        shared_system_prompt_ratio_given: workload.shared_system_prompt_ratio.is_some(),
        think_time_s: workload.think_time_s,
        block_size: workload.block_size,
        user_tokens_per_turn: whole.user,
        system_prompt_tokens: whole.system,
        shared_system_prompt: whole.shared,
        unique_system_prompt: whole.system - whole.shared,
        effective_isl: whole.isl(),
        effective_hit_rate: whole.hit_rate(),
        effective_hit_rate_by_blocks: whole.hit_rate_by_blocks(workload.block_size),
        feasible_hit_rate: problem.feasible_hit_rate(),
        feasible_shared_system_prompt_ratio: Range { min: problem.least_ratio(1.0), max: 1.0 },
        per_turn: (1..=workload.num_turns).map(|k| whole.spec_turn(k, workload.block_size)).collect(),
        notices: problem.notices(ratio, &whole),
    })
}

/// Prompt tokens that the plan has for turn `turn` (from 1), as the server counts them: s + k·u + (k−1)·osl.
#[must_use]
pub fn planned_total(spec: &Spec, turn: u32) -> u32 {
    total(spec.system_prompt_tokens, spec.user_tokens_per_turn, spec.osl, turn)
}

/// Tokens of the texts inside the messages: what is left of the plan when the server's template took its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageTokens {
    /// Text of the system prompt; 0: no system message is sent.
    pub system: u32,
    /// Of these, the leading ones that all sessions share.
    pub shared_system: u32,
    /// Text of the first turn's user message; at least 1.
    pub first_user: u32,
    /// Text of each later turn's user message when replies have their planned length; at least 1.
    pub later_user: u32,
}

/// Takes the template's cost off a spec, so that prompts with the template around them have the planned totals.
///
/// The system message bears what the first turn costs beyond a later one, and keeps at least one token where the
/// spec has a system prompt; what does not fit there the first user message bears.
///
/// # Errors
/// [`TemplateTooLarge`] when a user message would have no token left.
pub fn message_tokens(spec: &Spec, template: TemplateCost) -> Result<MessageTokens, TemplateTooLarge> {
    let too_large = || TemplateTooLarge {
        first_turn_tokens: template.first_turn_tokens,
        later_turn_tokens: template.later_turn_tokens,
        first_turn_plan: planned_total(spec, 1),
        user_tokens_per_turn: spec.user_tokens_per_turn,
    };
    let system_cost = template.first_turn_tokens.saturating_sub(template.later_turn_tokens);
    let system = match spec.system_prompt_tokens {
        0 => 0,
        tokens => tokens.saturating_sub(system_cost).max(1),
    };
    let first_user =
        i64::from(planned_total(spec, 1)) - i64::from(template.first_turn_tokens) - i64::from(system);
    let later_user = i64::from(spec.user_tokens_per_turn) - i64::from(template.later_turn_tokens);
    // A session of one turn has no later one that could be too small.
    let later_user = if spec.num_turns == 1 { later_user.max(1) } else { later_user };
    let at_least_one = |tokens: i64| u32::try_from(tokens).ok().filter(|&t| t >= 1).ok_or_else(too_large);
    Ok(MessageTokens {
        system,
        // All of the system message when all is shared, whatever the template took of it.
        shared_system: system.saturating_sub(spec.unique_system_prompt),
        first_user: at_least_one(first_user)?,
        later_user: at_least_one(later_user)?,
    })
}

/// The chat template leaves no room for a user message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the server's chat template takes {first_turn_tokens} tokens of the first turn and {later_turn_tokens} of each \
     later one, which leaves no token for the user message: the plan has {first_turn_plan} tokens for the first turn \
     and u = {user_tokens_per_turn} new ones for each later one; raise the ISL or lower the hit rate"
)]
pub struct TemplateTooLarge {
    /// Template tokens of the first turn.
    pub first_turn_tokens: u32,
    /// Template tokens of each later turn.
    pub later_turn_tokens: u32,
    /// Prompt tokens planned for the first turn.
    pub first_turn_plan: u32,
    /// u of the plan.
    pub user_tokens_per_turn: u32,
}

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

/// The equations in real numbers. A shared share that was not given may be any.
#[derive(Clone, Copy, Debug)]
struct Problem {
    isl: u32,
    osl: u32,
    turns: u32,
    hit_rate: Option<f64>,
    ratio: Option<f64>,
}

impl Problem {
    fn of(w: &Workload) -> Self {
        Problem {
            isl: w.isl,
            osl: w.osl,
            turns: w.num_turns,
            hit_rate: w.hit_rate,
            ratio: w.shared_system_prompt_ratio,
        }
    }

    fn n(&self) -> f64 {
        f64::from(self.turns)
    }

    /// Average tokens of earlier replies in a prompt.
    fn history(&self) -> f64 {
        f64::from(self.osl) * (self.n() - 1.0) / 2.0
    }

    /// Average prompt tokens that are not earlier replies: s + u·(n+1)/2.
    fn own(&self) -> f64 {
        f64::from(self.isl) - self.history()
    }

    /// u with no system prompt; the largest there is.
    fn most_user(&self) -> f64 {
        2.0 * self.own() / (self.n() + 1.0)
    }

    fn system_beside(&self, user: f64) -> f64 {
        self.own() - user * (self.n() + 1.0) / 2.0
    }

    fn hit_rate(&self) -> f64 {
        self.hit_rate.unwrap_or_else(|| (1.0 - self.most_user() / f64::from(self.isl)).max(0.0))
    }

    /// Average new tokens of a turn that are asked for.
    fn new_asked(&self) -> f64 {
        match self.hit_rate {
            Some(h) => (1.0 - h) * f64::from(self.isl),
            None => self.most_user(),
        }
    }

    /// Average new tokens of a turn that these values give.
    fn new_at(&self, user: f64, ratio: f64) -> f64 {
        (1.0 - ratio) * self.system_beside(user) / self.n() + user
    }

    /// The u of both equations; `None` when every u does (one turn, nothing shared).
    fn user_at(&self, ratio: f64) -> Option<f64> {
        let n = self.n();
        // Growth of the new tokens with u while s makes room; in this form nothing cancels out.
        let slope = ((n - 1.0) + ratio * (n + 1.0)) / (2.0 * n);
        (slope > 0.0).then(|| (self.new_asked() - (1.0 - ratio) * self.own() / n) / slope)
    }

    /// What is left above each bound, in tokens: room beside the history, u ≥ 1, s ≥ 0. Each is linear in the ISL and
    /// in the OSL. With an open shared share the most favourable one counts, which is 1.
    fn slacks(&self) -> [f64; 3] {
        let ratio = self.ratio.unwrap_or(1.0);
        [
            self.most_user() - 1.0,
            self.new_asked() - self.new_at(1.0, ratio),
            self.most_user() - self.new_asked(),
        ]
    }

    fn is_feasible(&self) -> bool {
        self.slacks().iter().all(|&slack| slack >= -TOLERANCE)
    }

    fn cause(&self) -> Option<Cause> {
        let broken = self.slacks().iter().position(|&slack| slack < -TOLERANCE)?;
        let hit_rate = self.hit_rate();
        Some(match broken {
            0 => Cause::HistoryTooLong {
                user_tokens: self.most_user(),
                history: self.history(),
                isl: self.isl,
                osl: self.osl,
                num_turns: self.turns,
            },
            1 => match self.user_at(self.ratio.unwrap_or(1.0)) {
                Some(user_tokens) => Cause::HitRateTooHigh { user_tokens, hit_rate, ratio: self.ratio },
                None => Cause::NothingToHit { hit_rate },
            },
            _ => {
                let user = self.user_at(self.ratio.unwrap_or(0.0)).unwrap_or_else(|| self.new_asked());
                Cause::HitRateTooLow { system_tokens: self.system_beside(user), hit_rate }
            }
        })
    }

    /// Hit rates that solve, at the given shared share, or at any when none was given. Of a feasible problem, or one
    /// whose hit rate alone makes it infeasible.
    fn feasible_hit_rate(&self) -> Range {
        let isl = f64::from(self.isl);
        let max = (1.0 - self.new_at(1.0, self.ratio.unwrap_or(1.0)) / isl).clamp(0.0, 1.0);
        Range { min: (1.0 - self.most_user() / isl).clamp(0.0, max), max }
    }

    /// Smallest shared share at which u reaches `least_user`.
    fn least_ratio(&self, least_user: f64) -> f64 {
        let room = self.system_beside(least_user);
        if room <= TOLERANCE {
            return 0.0; // No system prompt is left that could be shared.
        }
        (1.0 - self.n() * (self.new_asked() - least_user) / room).clamp(0.0, 1.0)
    }

    /// The given shared share; else 0, or if that is infeasible the smallest, rounded up to 0.01, that gives user
    /// messages of a useful length, or if there is none, of one token.
    fn chosen_ratio(&self) -> f64 {
        if let Some(given) = self.ratio {
            return given;
        }
        if (Problem { ratio: Some(0.0), ..*self }).is_feasible() {
            return 0.0;
        }
        let useful = self.useful_user();
        let least_user = if self.new_asked() >= useful { useful } else { 1.0 };
        round_up(self.least_ratio(least_user), 100.0)
    }

    fn useful_user(&self) -> f64 {
        LEAST_USER_TOKENS.max(LEAST_USER_SHARE * f64::from(self.isl))
    }

    /// The whole numbers beside the real solution whose hit rate is nearest to the one asked for.
    fn nearest_whole(&self, ratio: f64) -> Whole {
        let real = self.user_at(ratio).unwrap_or_else(|| self.most_user()).min(self.most_user()).max(1.0);
        // The lower neighbour must survive an error of the last digits below a whole number.
        let lower = whole_tokens((real + TOLERANCE).floor());
        let hit_rate = self.hit_rate();
        [lower, lower + 1]
            .into_iter()
            .filter(|&user| f64::from(user) < real + 1.0)
            .flat_map(|user| self.systems_beside(user).map(move |system| (user, system)))
            .filter_map(|(user, system)| {
                let system = u32::try_from(system).ok()?;
                let shared = whole_tokens((ratio * f64::from(system)).round());
                Some(Whole { user, system, shared, osl: self.osl, turns: self.turns })
            })
            .min_by(|a, b| {
                // Equally far to the last digits: nearer to the real u.
                let off = |w: &Whole| ((w.hit_rate() - hit_rate).abs() * 1e12).round();
                let user_off = |w: &Whole| (f64::from(w.user) - real).abs();
                off(a).total_cmp(&off(b)).then(user_off(a).total_cmp(&user_off(b)))
            })
            .expect("a feasible problem leaves s ≥ 0 at the lower neighbour of u")
    }

    /// The one or two whole s that keep the ISL within half a token; negative where u leaves no room.
    fn systems_beside(&self, user: u32) -> impl Iterator<Item = i64> + use<> {
        let (isl, osl, n, user) =
            (i64::from(self.isl), i64::from(self.osl), i64::from(self.turns), i64::from(user));
        let twice = 2 * isl - user * (n + 1) - osl * (n - 1);
        twice.div_euclid(2)..=twice.div_euclid(2) + twice.rem_euclid(2)
    }

    fn ways_out(&self) -> WaysOut {
        WaysOut {
            isl: nearest_number(self.isl, |isl| Problem { isl, ..*self }),
            osl: nearest_number(self.osl, |osl| Problem { osl, ..*self }),
            hit_rate: self.nearest_hit_rate(),
            num_turns: self.nearest_turns(),
            shared_system_prompt_ratio: self.nearest_ratio(),
        }
    }

    fn nearest_hit_rate(&self) -> Option<f64> {
        let asked = self.hit_rate?;
        let Range { min, max } = self.feasible_hit_rate();
        let nearest = asked.clamp(min, max);
        let inwards = if asked > max { (nearest * 1e4).floor() } else { (nearest * 1e4).ceil() } / 1e4;
        [inwards, nearest].into_iter().find(|&h| (Problem { hit_rate: Some(h), ..*self }).is_feasible())
    }

    fn nearest_turns(&self) -> Option<u32> {
        (1..MAX_TURNS)
            .flat_map(|d| [self.turns.checked_sub(d), self.turns.checked_add(d)])
            .flatten()
            .filter(|turns| (1..=MAX_TURNS).contains(turns))
            .find(|&turns| (Problem { turns, ..*self }).is_feasible())
    }

    fn nearest_ratio(&self) -> Option<f64> {
        self.ratio?;
        let ratio = round_up(self.least_ratio(1.0), 1e4);
        (Problem { ratio: Some(ratio), ..*self }).is_feasible().then_some(ratio)
    }

    fn notices(&self, ratio: f64, whole: &Whole) -> Vec<String> {
        let mut notices = Vec::new();
        let asked = self.hit_rate();
        if self.ratio.is_none() && ratio > 0.0 {
            let limit = (Problem { ratio: Some(0.0), ..*self }).feasible_hit_rate().max;
            notices.push(format!(
                "shared_system_prompt_ratio raised from its default 0 to {ratio}: at 0 the hit rate can be at most \
                 {limit:.4}, and {asked} was asked for"
            ));
            let useful = self.useful_user();
            if self.new_asked() < useful {
                notices.push(format!(
                    "user messages are very short, {} tokens: a hit rate of {asked} leaves {:.1} new tokens a turn",
                    whole.user,
                    self.new_asked()
                ));
            }
        }
        if self.hit_rate.is_none() && whole.system > 0 {
            notices.push(format!(
                "a system prompt of {} tokens takes up what {} equal user messages leave of the ISL",
                whole.system, self.turns
            ));
        }
        if whole.system == 0 && ratio > 0.0 {
            notices.push(format!(
                "the system prompt is empty, so the shared system prompt ratio of {ratio} has no effect"
            ));
        }
        if self.hit_rate.is_some() && (whole.hit_rate() - asked).abs() > NOTABLE_HIT_RATE_ERROR {
            notices.push(format!(
                "whole tokens make the hit rate {:.4} where {asked} was asked for",
                whole.hit_rate()
            ));
        }
        notices
    }
}

/// The number from 1 to [`MAX_TOKENS`] nearest to `current` that makes a feasible problem. Every slack is linear in
/// it, so each bound holds on one side of a threshold, and the feasible numbers are an interval.
fn nearest_number(current: u32, problem: impl Fn(u32) -> Problem) -> Option<u32> {
    let (mut low, mut high) = (1, MAX_TOKENS);
    for bound in 0..3 {
        let holds = |x: u32| problem(x).slacks()[bound] >= -TOLERANCE;
        match (holds(1), holds(MAX_TOKENS)) {
            (true, true) => {}
            (false, false) => return None,
            (true, false) => high = high.min(last_like_first(holds)),
            (false, true) => low = low.max(last_like_first(holds) + 1),
        }
    }
    (low <= high).then(|| current.clamp(low, high)).filter(|&x| problem(x).is_feasible())
}

/// The last number whose answer is that of 1, given that the answer changes once up to [`MAX_TOKENS`].
fn last_like_first(holds: impl Fn(u32) -> bool) -> u32 {
    let first = holds(1);
    let (mut like, mut unlike) = (1, MAX_TOKENS);
    while unlike - like > 1 {
        let middle = like + (unlike - like) / 2;
        if holds(middle) == first { like = middle } else { unlike = middle }
    }
    like
}

fn round_up(ratio: f64, steps: f64) -> f64 {
    // What is above a step by no more than the arithmetic's error is that step.
    ((ratio * steps - 1e-9).ceil() / steps).clamp(0.0, 1.0)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "from 0 to MAX_TOKENS, and whole"
)]
fn whole_tokens(tokens: f64) -> u32 {
    tokens as u32
}

/// s + k·u + (k−1)·osl. A turn's prompt is under twice the ISL, so that it fits.
fn total(system: u32, user: u32, osl: u32, turn: u32) -> u32 {
    let tokens = u64::from(system)
        + u64::from(turn) * u64::from(user)
        + u64::from(turn.saturating_sub(1)) * u64::from(osl);
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// A solution in whole tokens.
#[derive(Clone, Copy, Debug)]
struct Whole {
    user: u32,
    system: u32,
    shared: u32,
    osl: u32,
    turns: u32,
}

impl Whole {
    fn cached(&self, turn: u32) -> u32 {
        if turn == 1 { self.shared } else { total(self.system, self.user, self.osl, turn - 1) + self.osl }
    }

    fn spec_turn(&self, turn: u32, block_size: u32) -> SpecTurn {
        let total = total(self.system, self.user, self.osl, turn);
        let cached = self.cached(turn);
        SpecTurn {
            turn,
            total,
            cached,
            new: total - cached,
            hit_rate: f64::from(cached) / f64::from(total),
            cached_by_blocks: self.cached_by_blocks(turn, block_size),
        }
    }

    /// Tokens that lie in whole blocks of a server's cache. The last token of a reply is not among them: it is
    /// generated, but nothing is computed from it before the next turn, so that no server holds its state.
    fn cached_by_blocks(&self, turn: u32, block_size: u32) -> u32 {
        let held = if turn == 1 { self.shared } else { self.cached(turn) - 1 };
        held - held % block_size
    }

    fn isl(&self) -> f64 {
        let n = f64::from(self.turns);
        f64::from(self.system)
            + f64::from(self.user) * (n + 1.0) / 2.0
            + f64::from(self.osl) * (n - 1.0) / 2.0
    }

    fn hit_rate(&self) -> f64 {
        let new = f64::from(self.system - self.shared) / f64::from(self.turns) + f64::from(self.user);
        (self.isl() - new) / self.isl()
    }

    fn hit_rate_by_blocks(&self, block_size: u32) -> f64 {
        let cached: u64 =
            (1..=self.turns).map(|turn| u64::from(self.cached_by_blocks(turn, block_size))).sum();
        cached as f64 / (self.isl() * f64::from(self.turns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    fn workload(isl: u32, osl: u32, hit_rate: Option<f64>, num_turns: u32, ratio: Option<f64>) -> Workload {
        Workload { isl, osl, hit_rate, num_turns, shared_system_prompt_ratio: ratio, ..Workload::default() }
    }

    #[test]
    fn the_requirements_example_gets_a_shared_share_of_0_11() {
        let spec = solve(&workload(2000, 200, Some(0.85), 5, None)).unwrap();
        assert_eq!(spec.shared_system_prompt_ratio, 0.11);
        assert!(!spec.shared_system_prompt_ratio_given);
        assert_eq!((spec.user_tokens_per_turn, spec.system_prompt_tokens), (33, 1501));
        assert_eq!((spec.shared_system_prompt, spec.unique_system_prompt), (165, 1336));
        assert_eq!(spec.effective_isl, 2000.0);
        assert!((spec.effective_hit_rate - 0.85).abs() * 2000.0 <= 0.5);
        assert_eq!(spec.notices.len(), 1, "{:?}", spec.notices);
        assert!(spec.notices[0].contains("default 0 to 0.11"), "{}", spec.notices[0]);
        let totals: Vec<u32> = spec.per_turn.iter().map(|t| t.total).collect();
        assert_eq!(totals, [1534, 1767, 2000, 2233, 2466]);
        assert_eq!((1..=5).map(|k| planned_total(&spec, k)).collect::<Vec<_>>(), totals);
        assert_eq!(spec.per_turn[0].cached, 165);
        assert_eq!((spec.per_turn[1].cached, spec.per_turn[1].cached_by_blocks), (1734, 1728));
    }

    #[test]
    fn the_last_token_of_a_reply_is_in_no_block() {
        let spec = solve(&workload(1000, 64, Some(0.7), 4, Some(0.5))).unwrap();
        let turns: Vec<(u32, u32)> = spec.per_turn.iter().map(|t| (t.cached, t.cached_by_blocks)).collect();
        // 112 shared tokens are seven blocks; 560 with a reply are 35 but for its last token.
        assert_eq!(turns, [(112, 112), (560, 544), (896, 880), (1232, 1216)]);
    }

    #[test]
    fn a_given_share_is_kept_or_refused_and_the_message_names_what_works() {
        let error = solve(&workload(2000, 200, Some(0.85), 5, Some(0.0))).unwrap_err();
        assert!(matches!(error.cause, Cause::HitRateTooHigh { ratio: Some(0.0), .. }));
        assert_eq!(
            error.to_string(),
            "infeasible workload: u = -50.0 user tokens a turn, below 1: a hit rate of 0.85 is too high with a shared \
             system prompt ratio of 0; the nearest that works, changing one alone: isl 1592, or osl 251, or hit rate \
             0.8398, or turns 6, or shared system prompt ratio 0.0639"
        );
        let spec = solve(&workload(2000, 200, Some(0.85), 5, Some(0.07))).unwrap();
        assert_eq!(spec.shared_system_prompt_ratio, 0.07);
    }

    #[test]
    fn a_hit_rate_below_what_history_gives_says_that_s_is_negative() {
        let error = solve(&workload(1000, 300, Some(0.1), 4, None)).unwrap_err();
        let Cause::HitRateTooLow { system_tokens, .. } = error.cause else { panic!("{error}") };
        assert!(system_tokens < 0.0);
        assert!(error.to_string().contains("below 0"), "{error}");
        assert_eq!(error.ways_out.hit_rate, Some(0.78));
    }

    #[test]
    fn a_history_longer_than_the_isl_says_so() {
        let error = solve(&workload(100, 100, None, 5, None)).unwrap_err();
        assert!(matches!(error.cause, Cause::HistoryTooLong { history: 200.0, .. }), "{error}");
        assert_eq!(error.ways_out.isl, Some(203));
        assert_eq!(error.ways_out.osl, Some(48));
        assert_eq!(error.ways_out.num_turns, Some(2));
        assert_eq!((error.ways_out.hit_rate, error.ways_out.shared_system_prompt_ratio), (None, None));
    }

    #[test]
    fn one_turn_with_nothing_shared_can_only_miss() {
        let spec = solve(&workload(1000, 100, Some(0.0), 1, Some(0.0))).unwrap();
        assert_eq!((spec.user_tokens_per_turn, spec.system_prompt_tokens), (1000, 0));
        assert_eq!(spec.feasible_hit_rate, Range { min: 0.0, max: 0.0 });
        let error = solve(&workload(1000, 100, Some(0.5), 1, Some(0.0))).unwrap_err();
        assert_eq!(error.cause, Cause::NothingToHit { hit_rate: 0.5 });
        assert_eq!(error.ways_out.shared_system_prompt_ratio, Some(0.5006));
        let spec = solve(&workload(1000, 100, Some(0.5), 1, None)).unwrap();
        assert_eq!(spec.effective_hit_rate, 0.5);
        assert_eq!(spec.shared_system_prompt_ratio, 0.52);
    }

    #[test]
    fn without_a_hit_rate_it_is_the_natural_one_without_a_system_prompt() {
        let spec = solve(&Workload::default()).unwrap();
        assert_eq!((spec.user_tokens_per_turn, spec.system_prompt_tokens), (1000, 0));
        assert_eq!((spec.hit_rate, spec.effective_hit_rate), (0.0, 0.0));
        let spec = solve(&workload(1000, 100, None, 4, Some(0.5))).unwrap();
        assert_eq!((spec.user_tokens_per_turn, spec.system_prompt_tokens), (340, 0));
        assert_eq!(spec.effective_hit_rate, 0.66);
        assert!(spec.notices[0].contains("no effect"));
    }

    #[test]
    fn everything_cached_is_never_feasible() {
        for turns in [1, 5, MAX_TURNS] {
            let error = solve(&workload(MAX_TOKENS, 10, Some(1.0), turns, Some(1.0))).unwrap_err();
            assert!(matches!(error.cause, Cause::HitRateTooHigh { .. }));
            assert_eq!((error.ways_out.isl, error.ways_out.num_turns), (None, None));
            assert_eq!(error.ways_out.hit_rate, Some(0.9999));
        }
    }

    #[test]
    fn a_hit_rate_too_high_for_useful_messages_gets_the_smallest_share_there_is() {
        // 20 new tokens a turn: below 32 whatever is shared.
        let spec = solve(&workload(2000, 200, Some(0.99), 5, None)).unwrap();
        assert!(spec.shared_system_prompt_ratio > 0.9 && spec.user_tokens_per_turn >= 1, "{spec:?}");
        assert!(spec.notices[1].contains("very short"), "{:?}", spec.notices);
    }

    #[test]
    fn a_field_out_of_bounds_is_refused_with_its_own_sentence() {
        let error = solve(&workload(0, 200, None, 5, None)).unwrap_err();
        assert_eq!(error.to_string(), "isl must be from 1 to 10000000, got 0");
        assert!(solve(&workload(10, 200, Some(f64::NAN), 5, None)).is_err());
        assert!(solve(&workload(10, 200, None, 0, None)).is_err());
    }

    #[test]
    fn the_template_comes_off_the_messages_and_the_totals_stay() {
        let spec = solve(&workload(2000, 200, Some(0.85), 5, None)).unwrap();
        let cost = TemplateCost { first_turn_tokens: 26, later_turn_tokens: 11 };
        let tokens = message_tokens(&spec, cost).unwrap();
        assert_eq!(
            tokens,
            MessageTokens { system: 1486, shared_system: 150, first_user: 22, later_user: 22 }
        );
        let cost = TemplateCost { first_turn_tokens: 40, later_turn_tokens: 33 };
        let error = message_tokens(&spec, cost).unwrap_err();
        assert!(error.to_string().contains("33 of each later one"), "{error}");
        // A session of one turn has no later one to be refused for.
        let spec = solve(&workload(30, 10, None, 1, None)).unwrap();
        let cost = TemplateCost { first_turn_tokens: 20, later_turn_tokens: 50 };
        assert_eq!(message_tokens(&spec, cost).unwrap().first_user, 10);
    }

    #[test]
    fn the_largest_plans_are_solved_or_refused_within_milliseconds() {
        let start = Instant::now();
        for isl in [1, MAX_TOKENS] {
            for osl in [1, 2000, MAX_TOKENS] {
                for turns in [1, 2, MAX_TURNS] {
                    for hit_rate in [None, Some(0.0), Some(0.5), Some(1.0 - 1e-7), Some(1.0)] {
                        for ratio in [None, Some(0.0), Some(1e-9), Some(1.0)] {
                            let w = workload(isl, osl, hit_rate, turns, ratio);
                            solve(&w).map_or_else(|e| check_ways_out(&w, &e), |s| check_spec(&w, &s));
                        }
                    }
                }
            }
        }
        // 360 plans, and as many again for their ways out.
        assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
    }

    fn check_spec(w: &Workload, spec: &Spec) {
        let (u, s, n) = (spec.user_tokens_per_turn, spec.system_prompt_tokens, w.num_turns);
        assert!(u >= 1);
        assert_eq!(spec.shared_system_prompt + spec.unique_system_prompt, s);
        assert_eq!(spec.per_turn.len(), n as usize);
        let mut held = spec.shared_system_prompt;
        for (t, k) in spec.per_turn.iter().zip(1..) {
            assert_eq!((t.turn, t.total, t.cached), (k, planned_total(spec, k), held));
            assert_eq!((t.cached + t.new, t.cached_by_blocks % w.block_size), (t.total, 0));
            // A block less, and the reply's last token.
            assert!(t.cached - t.cached_by_blocks <= w.block_size && t.hit_rate < 1.0);
            held = t.total + w.osl;
        }
        let sum = |f: fn(&SpecTurn) -> u32| spec.per_turn.iter().map(|t| f64::from(f(t))).sum::<f64>();
        let near = |a: f64, b: f64| assert!((a - b).abs() <= 1e-9 * (1.0 + b.abs()), "{a} is not {b}");
        near(spec.effective_isl, sum(|t| t.total) / f64::from(n));
        near(spec.effective_hit_rate, sum(|t| t.cached) / sum(|t| t.total));
        near(spec.effective_hit_rate_by_blocks, sum(|t| t.cached_by_blocks) / sum(|t| t.total));
        assert!((spec.effective_isl - f64::from(w.isl)).abs() <= 0.5);
        let off = (spec.effective_hit_rate - spec.hit_rate).abs() * f64::from(w.isl);
        let has_room = f64::from(s) >= f64::from(n + 1) / 2.0 || w.shared_system_prompt_ratio.is_none();
        assert!(off <= if has_room { 0.501 } else { 1.0 }, "hit rate off by {off} tokens: {w:?}");
        if let Some(f) = w.shared_system_prompt_ratio {
            assert_eq!(spec.shared_system_prompt_ratio, f);
        }
    }

    fn check_ways_out(w: &Workload, error: &Infeasible) {
        let WaysOut { isl, osl, hit_rate, num_turns, shared_system_prompt_ratio } = error.ways_out;
        let works = |w: Workload| {
            let spec = solve(&w).unwrap_or_else(|e| panic!("suggested {w:?}: {e}"));
            check_spec(&w, &spec);
        };
        let fails = |w: Workload| assert!(solve(&w).is_err(), "nearer, and works: {w:?}");
        if let Some(isl) = isl {
            works(Workload { isl, ..w.clone() });
            fails(Workload { isl: if isl > w.isl { isl - 1 } else { isl + 1 }, ..w.clone() });
        }
        if let Some(osl) = osl {
            works(Workload { osl, ..w.clone() });
            fails(Workload { osl: if osl > w.osl { osl - 1 } else { osl + 1 }, ..w.clone() });
        }
        if let Some(num_turns) = num_turns {
            works(Workload { num_turns, ..w.clone() });
        }
        if let Some(h) = hit_rate {
            works(Workload { hit_rate: Some(h), ..w.clone() });
            let nearer = if h > w.hit_rate.unwrap_or(h) { h - 1.01e-4 } else { h + 1.01e-4 };
            fails(Workload { hit_rate: Some(nearer), ..w.clone() });
        }
        if let Some(f) = shared_system_prompt_ratio {
            works(Workload { shared_system_prompt_ratio: Some(f), ..w.clone() });
            fails(Workload { shared_system_prompt_ratio: Some(f - 1.01e-4), ..w.clone() });
        }
    }

    /// Token counts of all magnitudes, so that both answers are common.
    fn tokens(most: u32) -> impl Strategy<Value = u32> {
        (0.0..f64::from(most).ln()).prop_map(|x: f64| whole_tokens(x.exp().round()).max(1))
    }

    fn any_workload() -> impl Strategy<Value = Workload> {
        let share =
            || prop::option::of(prop_oneof![3 => 0.0..=1.0, 1 => Just(0.0), 1 => Just(1.0), 1 => 0.9..=1.0]);
        (tokens(MAX_TOKENS), tokens(20_000), share(), tokens(200), share())
            .prop_map(|(isl, osl, h, n, f)| workload(isl, osl, h, n, f))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

        #[test]
        fn a_solution_adds_up_and_an_infeasible_workload_names_only_what_solves(w in any_workload()) {
            match solve(&w) {
                Ok(spec) => check_spec(&w, &spec),
                Err(error) => check_ways_out(&w, &error),
            }
        }

        #[test]
        fn no_way_out_means_that_nothing_works(w in any_workload(), isl in tokens(MAX_TOKENS),
            osl in tokens(MAX_TOKENS), n in 1..300u32, h in 0.0..=1.0, f in 0.0..=1.0)
        {
            let Err(Infeasible { ways_out, .. }) = solve(&w) else { return Ok(()) };
            let tried = [
                (ways_out.isl.is_some(), Workload { isl, ..w.clone() }),
                (ways_out.osl.is_some(), Workload { osl, ..w.clone() }),
                (ways_out.num_turns.is_some(), Workload { num_turns: n, ..w.clone() }),
                (ways_out.hit_rate.is_some(), Workload { hit_rate: Some(h), ..w.clone() }),
                (ways_out.shared_system_prompt_ratio.is_some() || w.shared_system_prompt_ratio.is_none(),
                    Workload { shared_system_prompt_ratio: Some(f), ..w.clone() }),
            ];
            for (named, other) in tried {
                prop_assert!(named || solve(&other).is_err(), "not named, and works: {:?}", other);
            }
        }

        #[test]
        fn the_feasible_ranges_are_exactly_what_solves(w in any_workload(), at in 0.0..=1.0_f64, out in 1e-6..1.0_f64) {
            let Ok(spec) = solve(&w) else { return Ok(()) };
            let solves_h = |h| solve(&Workload { hit_rate: Some(h), ..w.clone() }).is_ok();
            let Range { min, max } = spec.feasible_hit_rate;
            for h in [min, max, min + at * (max - min)] {
                prop_assert!(solves_h(h), "inside at {}", h);
            }
            prop_assert!(!solves_h(max + (out * (1.0 - max)).max(2e-6)));
            prop_assert!(min < 2e-6 || !solves_h(min - (out * min).max(2e-6)));
            let solves_f = |f| solve(&Workload { shared_system_prompt_ratio: Some(f), ..w.clone() }).is_ok();
            let Range { min, max } = spec.feasible_shared_system_prompt_ratio;
            for f in [min, max, min + at * (max - min), spec.shared_system_prompt_ratio] {
                prop_assert!(solves_f(f), "inside at {}", f);
            }
            // A difference of one token is the finest that the system prompt can show.
            prop_assert!(min < 0.01 || spec.system_prompt_tokens < 200 || !solves_f(min * (1.0 - out.max(1e-3))));
        }
    }
}
