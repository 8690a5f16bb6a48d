//! The closed loop: a fixed number of active sessions; when one ends the next starts. Warm-up ends when the active
//! sessions are spread over their turns; the run drains when no session is left to start.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::atomic::Ordering;

use crossbeam_channel::Receiver;
use proto::record::Phases;
use proto::wire::State;
use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::engine::clock::ns;
use crate::engine::run_data::ScheduleCounts;
use crate::engine::schedule::{Conducted, Dispatcher, Message, Supply, hear};
use crate::engine::session::{Dispatch, Turn};

/// Share of the largest possible entropy of turn indices at which the sessions count as spread.
const STEADY_ENTROPY: f64 = 0.5;
/// Failures in a row after which a session that takes the place of a failed one starts later and later: against a
/// server that refuses at once, a closed loop would otherwise turn as fast as the machine can.
const FAILURES_IN_A_ROW: u32 = 3;
/// The first such pause; each further failure doubles it.
const FIRST_PAUSE_S: f64 = 0.01;
/// The longest.
const LONGEST_PAUSE_S: f64 = 1.0;
/// First turns made ahead at most, beyond the first generation.
const AHEAD: (u64, u64) = (64, 4096);

/// What a closed loop is asked to do.
#[derive(Clone, Copy, Debug)]
pub struct ClosedPlan {
    /// Active sessions.
    pub concurrency: u32,
    /// Sessions after the first generation.
    pub num_sessions: Option<u64>,
    /// Length, warm-up included.
    pub duration_s: Option<f64>,
    /// Requests of sessions after the first generation.
    pub num_requests: Option<u64>,
    /// Between the first sessions' starts.
    pub ramp_interval_s: f64,
    /// Upper end of the delay added between turns during warm-up.
    pub warmup_jitter_max_s: f64,
    /// Wait for what is in flight at a timed end.
    pub drain_timeout_s: f64,
    /// Turns of a session.
    pub num_turns: u32,
    /// Between an answer and the next turn.
    pub think_time_s: f64,
    /// Seed of cuts and jitter.
    pub seed: u64,
}

/// The first turns that a closed loop needs: a first generation of cut sessions, then whole ones.
pub fn supply(plan: &ClosedPlan) -> Supply {
    let first = u64::from(plan.concurrency);
    let limit = plan.num_sessions.map(|n| n.saturating_add(first));
    Supply::new(plan.num_turns, cut_lengths(plan), limit, first.clamp(AHEAD.0, AHEAD.1))
}

/// Lengths of the first generation: a shuffled 1..n, repeated, so that the pool does not march in step.
fn cut_lengths(plan: &ClosedPlan) -> Vec<u32> {
    let mut rng = rng(plan, "cuts");
    let mut one_to_n: Vec<u32> = (1..=plan.num_turns).collect();
    let mut lengths = Vec::new();
    while lengths.len() < plan.concurrency as usize {
        one_to_n.shuffle(&mut rng);
        lengths.extend_from_slice(&one_to_n);
    }
    lengths.truncate(plan.concurrency as usize);
    lengths
}

fn rng(plan: &ClosedPlan, purpose: &str) -> ChaCha8Rng {
    crate::engine::seeded(plan.seed, purpose)
}

/// Runs a closed loop to its end on the calling thread.
pub fn conduct(
    plan: ClosedPlan,
    dispatcher: Dispatcher,
    supply: Supply,
    inbox: &Receiver<Message>,
) -> Conducted {
    let mut closed = Closed {
        due: BinaryHeap::new(),
        due_turns: HashMap::new(),
        next_start: 0,
        active: 0,
        at_turn: vec![0; plan.num_turns as usize + 1],
        failures_in_a_row: 0,
        cut_open: plan.concurrency,
        is_spread: false,
        outstanding: 0,
        whole_requests: 0,
        phases: Phases { measured_from_ns: i64::MAX, measured_to_ns: plan.duration_s.map_or(i64::MAX, ns) },
        drains_from_ns: None,
        last_ns: 0,
        counts: ScheduleCounts::default(),
        stopped_at_ns: None,
        jitter: rng(&plan, "jitter"),
        plan,
        dispatcher,
        supply,
    };
    closed.run(inbox);
    let mut phases = closed.phases;
    let end_ns = closed.stopped_at_ns.or(closed.drains_from_ns).unwrap_or(match plan.duration_s {
        Some(duration_s) => ns(duration_s),
        None => closed.last_ns,
    });
    phases.measured_to_ns = phases.measured_to_ns.min(end_ns);
    Conducted {
        phases,
        steady_state_reached: Some(phases.measured_from_ns < phases.measured_to_ns),
        counts: closed.counts,
        last_turn_sent_in_warm_up: None,
        is_stopped: closed.stopped_at_ns.is_some(),
    }
}

/// What falls due: the start of a session, or the next turn of one. Ordered by due, then by when it was planned.
type Due = Reverse<(i64, u64)>;

struct Closed {
    plan: ClosedPlan,
    dispatcher: Dispatcher,
    supply: Supply,
    due: BinaryHeap<Due>,
    /// Turns in `due`, by their place in it; the others there are starts.
    due_turns: HashMap<u64, Box<Turn>>,
    /// Places given out in `due`.
    next_start: u64,
    /// Sessions that have started, or whose start is planned, and that have not ended.
    active: u64,
    /// Active sessions by the turn that they are at, from 1.
    at_turn: Vec<u64>,
    /// Failed turns since the last that was answered.
    failures_in_a_row: u32,
    /// Sessions of the first generation that have not ended.
    cut_open: u32,
    /// Whether the sessions were spread over their turns at some time.
    is_spread: bool,
    outstanding: u64,
    /// Requests sent by sessions after the first generation.
    whole_requests: u64,
    phases: Phases,
    drains_from_ns: Option<i64>,
    /// The last completion.
    last_ns: i64,
    counts: ScheduleCounts,
    stopped_at_ns: Option<i64>,
    jitter: ChaCha8Rng,
}

impl Closed {
    fn run(&mut self, inbox: &Receiver<Message>) {
        let clock = self.dispatcher.clock;
        for i in 0..self.plan.concurrency {
            self.plan_start(ns(self.plan.ramp_interval_s * f64::from(i)));
        }
        let mut give_up_ns = None;
        loop {
            while let Ok(message) = inbox.try_recv() {
                self.handle(message);
            }
            if self.has_ended(clock.now_ns()) {
                // The load is whole until a turn is due that is not sent any more.
                if let Some(Reverse((due_ns, _))) = self.due.peek() {
                    self.drains_from_ns.get_or_insert(*due_ns);
                }
                self.due.clear();
                self.due_turns.clear();
            }
            self.tell_state();
            let next_ns = self.due.peek().map(|Reverse((due_ns, _))| *due_ns);
            match next_ns {
                Some(due_ns) if due_ns <= clock.now_ns() => self.send_next(inbox),
                Some(due_ns) => {
                    if let Some(message) = hear(inbox, &clock, Some(due_ns)) {
                        self.handle(message);
                    }
                }
                None if self.outstanding == 0 => return,
                None => {
                    // Sessions that run to their end keep the load up themselves; only a timed or counted end, or a
                    // stop, waits for what is in flight with a deadline.
                    let is_cut_off = self.has_ended(clock.now_ns()) && !self.dispatcher.abort.is_cancelled();
                    let deadline = is_cut_off.then(|| {
                        *give_up_ns.get_or_insert_with(|| {
                            clock.now_ns().saturating_add(ns(self.plan.drain_timeout_s))
                        })
                    });
                    match hear(inbox, &clock, deadline.or_else(|| self.end_ns())) {
                        Some(message) => self.handle(message),
                        None if deadline.is_some() => self.dispatcher.abort.cancel(),
                        None => {}
                    }
                }
            }
        }
    }

    /// The end by the clock, while it lies ahead.
    fn end_ns(&self) -> Option<i64> {
        let end_ns = self.plan.duration_s.map(ns)?;
        (end_ns > self.dispatcher.clock.now_ns()).then_some(end_ns)
    }

    /// Whether no turn may start any more.
    fn has_ended(&self, now_ns: i64) -> bool {
        self.stopped_at_ns.is_some()
            || self.plan.duration_s.is_some_and(|d| now_ns >= ns(d))
            || self.plan.num_requests.is_some_and(|n| self.whole_requests >= n)
    }

    fn tell_state(&self) {
        self.dispatcher.live.set_state(
            if self.drains_from_ns.is_some() || (self.due.is_empty() && !self.supply.has_more()) {
                State::Draining
            } else if self.phases.measured_from_ns == i64::MAX {
                State::WarmUp
            } else {
                State::Measuring
            },
        );
    }

    fn plan_start(&mut self, due_ns: i64) {
        self.due.push(Reverse((due_ns, self.next_start)));
        self.next_start += 1;
        self.active += 1;
    }

    fn plan_turn(&mut self, due_ns: i64, turn: Box<Turn>) {
        self.due.push(Reverse((due_ns, self.next_start)));
        self.due_turns.insert(self.next_start, turn);
        self.next_start += 1;
    }

    fn send_next(&mut self, inbox: &Receiver<Message>) {
        let Some(Reverse((due_ns, place))) = self.due.pop() else { return };
        let turn = match self.due_turns.remove(&place) {
            Some(turn) => turn,
            None => {
                let Some(turn) = self.fresh(inbox) else { return };
                self.counts.sessions_started += 1;
                self.at_turn[1] += 1;
                self.watch_spread();
                turn
            }
        };
        if turn.session.number >= u64::from(self.plan.concurrency) {
            self.whole_requests += 1;
        }
        self.outstanding += 1;
        self.dispatcher.send(turn, Dispatch { due_ns, cap_wait_ns: 0 });
    }

    /// The next session's first turn, awaited when it was not made in time; `None` when stopped meanwhile.
    fn fresh(&mut self, inbox: &Receiver<Message>) -> Option<Box<Turn>> {
        if let Some(turn) = self.supply.take(&self.dispatcher.prompts) {
            return Some(turn);
        }
        self.counts.prompt_supply_dry += 1;
        while self.stopped_at_ns.is_none() {
            if let Some(message) = hear(inbox, &self.dispatcher.clock, None) {
                self.handle(message);
            }
            if let Some(turn) = self.supply.take(&self.dispatcher.prompts) {
                return Some(turn);
            }
        }
        None
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Fresh(turn) => self.supply.put(turn),
            Message::Answered { at_ns } => self.last_ns = self.last_ns.max(at_ns),
            Message::Ready { turn, completed_ns } => {
                self.outstanding -= 1;
                self.failures_in_a_row = 0;
                let at = turn.session.turn as usize;
                self.at_turn[at - 1] -= 1;
                self.at_turn[at] += 1;
                self.watch_spread();
                let mut pause_s = self.plan.think_time_s;
                if self.phases.measured_from_ns == i64::MAX && self.plan.warmup_jitter_max_s > 0.0 {
                    pause_s += self.jitter.random_range(0.0..self.plan.warmup_jitter_max_s);
                }
                self.plan_turn(completed_ns.saturating_add(ns(pause_s)), turn);
            }
            Message::Over { number, turn, broken, at_ns } => {
                self.outstanding -= 1;
                self.session_over(
                    number,
                    turn,
                    broken,
                    at_ns.unwrap_or_else(|| self.dispatcher.clock.now_ns()),
                );
            }
            Message::Stop => {
                if self.stopped_at_ns.is_none() {
                    self.stopped_at_ns = Some(self.dispatcher.clock.now_ns());
                    self.dispatcher.abort.cancel();
                }
            }
        }
    }

    fn session_over(&mut self, number: u64, turn: u32, broken: bool, at_ns: i64) {
        self.at_turn[turn as usize] -= 1;
        self.active -= 1;
        self.dispatcher.live.sessions_ended.fetch_add(1, Ordering::Relaxed);
        let mut pause_ns = 0;
        if !broken {
            self.failures_in_a_row = 0;
            self.counts.sessions_completed += 1;
        } else if !self.dispatcher.abort.is_cancelled() {
            self.failures_in_a_row = self.failures_in_a_row.saturating_add(1);
            pause_ns = ns(pause_s(self.failures_in_a_row));
            self.counts.sessions_failed += 1;
        }
        if number < u64::from(self.plan.concurrency) {
            self.cut_open -= 1;
        }
        let planned_starts = self.due.len() - self.due_turns.len();
        let more = self.supply.limit.is_none_or(|l| self.supply.next_to_take + (planned_starts as u64) < l);
        if more {
            self.plan_start(at_ns.saturating_add(pause_ns));
        } else {
            // From here on the pool shrinks: that is not the load that was asked for.
            self.drains_from_ns.get_or_insert(at_ns);
        }
        let one_is_enough = self.plan.num_turns == 1 || self.plan.concurrency == 1;
        let is_steady = one_is_enough || (self.is_spread && self.cut_open == 0);
        if is_steady && self.phases.measured_from_ns == i64::MAX {
            self.phases.measured_from_ns = at_ns;
            self.dispatcher.live.set_measured_from(at_ns);
        }
    }

    /// Notes when the Shannon entropy of the active sessions' turns has reached its share of the possible.
    fn watch_spread(&mut self) {
        if self.is_spread {
            return;
        }
        let total: u64 = self.at_turn.iter().sum();
        let most = f64::from(self.plan.concurrency.min(self.plan.num_turns)).log2();
        self.is_spread = entropy_bits(&self.at_turn, total) >= STEADY_ENTROPY * most;
    }
}

/// Time before another session takes the place of a failed one.
fn pause_s(failures_in_a_row: u32) -> f64 {
    match failures_in_a_row.checked_sub(FAILURES_IN_A_ROW) {
        None => 0.0,
        Some(more) => (FIRST_PAUSE_S * 2f64.powi(more.min(16).cast_signed())).min(LONGEST_PAUSE_S),
    }
}

fn entropy_bits(counts: &[u64], total: u64) -> f64 {
    counts
        .iter()
        .filter(|n| **n > 0)
        .map(|n| {
            let share = *n as f64 / total as f64;
            -share * share.log2()
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(concurrency: u32, num_turns: u32) -> ClosedPlan {
        ClosedPlan {
            concurrency,
            num_sessions: Some(10),
            duration_s: None,
            num_requests: None,
            ramp_interval_s: 0.0,
            warmup_jitter_max_s: 0.0,
            drain_timeout_s: 1.0,
            num_turns,
            think_time_s: 0.0,
            seed: 7,
        }
    }

    #[test]
    fn the_first_generation_is_cut_to_every_length_alike() {
        let mut lengths = cut_lengths(&plan(20, 5));
        assert_ne!(lengths[..5], [1, 2, 3, 4, 5], "shuffled");
        lengths.sort_unstable();
        let want: Vec<u32> = (1..=5).flat_map(|n| [n; 4]).collect();
        assert_eq!(lengths, want);
        assert_eq!(cut_lengths(&plan(20, 5)), cut_lengths(&plan(20, 5)), "fixed by the seed");
        assert_eq!(cut_lengths(&plan(3, 10)).len(), 3);
    }

    #[test]
    fn only_failures_in_a_row_make_the_next_session_wait() {
        assert_eq!([0, 1, 2].map(pause_s), [0.0; 3], "a failure now and then changes nothing");
        assert_eq!([3, 4, 5].map(pause_s), [0.01, 0.02, 0.04]);
        assert_eq!([10, 20, u32::MAX].map(pause_s), [1.0; 3]);
    }

    #[test]
    fn entropy_is_zero_in_step_and_log2_when_even() {
        assert_eq!(entropy_bits(&[0, 8, 0, 0, 0], 8), 0.0);
        assert!((entropy_bits(&[0, 2, 2, 2, 2], 8) - 2.0).abs() < 1e-12);
    }
}
