//! From a workload in the user's terms to whole tokens: u user tokens a turn and s system prompt tokens, turn by
//! turn. Takes a [`Workload`], gives a [`Spec`] or says what could be asked instead. Pure and bounded: no search is
//! longer than the number of turns that a plan may have.

mod infeasible;
mod messages;
mod whole;

use proto::plan::{MAX_TOKENS, MAX_TURNS, Workload};
use proto::spec::{Range, Spec};

use whole::{Whole, total};

pub use infeasible::{Cause, Infeasible, WaysOut};
pub use messages::{MessageTokens, TemplateTooLarge, message_tokens};

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

#[cfg(test)]
mod tests;
