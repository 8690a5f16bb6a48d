//! The open loop: slots at the instants of an arrival process, whatever the server does. A slot is never skipped; a
//! late one goes out at once, in order, and its lateness is in the record. Which turn it takes is [`Turns`]' choice.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::atomic::Ordering;

use crossbeam_channel::Receiver;
use proto::gaps::Gaps;
use proto::metric;
use proto::plan::Arrival;
use proto::record::{Outcome, Phases, Record};
use proto::wire::State;

use crate::engine::arrival::Slots;
use crate::engine::clock::ns;
use crate::engine::run_data::ScheduleCounts;
use crate::engine::schedule::{Conducted, Dispatcher, Message, Supply, hear};
use crate::engine::session::{Dispatch, Turn};
use crate::engine::turns::{Choice, Turns};

/// First turns made ahead: what a second of session starts needs, within these bounds.
const AHEAD: (u64, u64) = (64, 4096);

/// What an open loop is asked to do.
#[derive(Clone, Copy, Debug)]
pub struct OpenPlan {
    /// Slots a second.
    pub rate_per_s: f64,
    /// Length of the schedule.
    pub duration_s: f64,
    /// Part of it that is warm-up.
    pub warm_up_s: f64,
    /// Spacing.
    pub arrival: Arrival,
    /// Above this many in flight a slot waits.
    pub max_concurrency: Option<u32>,
    /// Above this many in flight a slot is refused.
    pub max_in_flight: u32,
    /// Wait for what is in flight at the end.
    pub drain_timeout_s: f64,
    /// Turns of a session.
    pub num_turns: u32,
    /// Between an answer and the next turn.
    pub think_time_s: f64,
    /// Seed of the arrivals.
    pub seed: u64,
}

/// The first turns that an open loop needs.
pub fn supply(plan: &OpenPlan) -> Supply {
    // At most a million a second.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let starts_per_s = (plan.rate_per_s / f64::from(plan.num_turns)) as u64;
    Supply::new(plan.num_turns, Vec::new(), None, starts_per_s.clamp(AHEAD.0, AHEAD.1))
}

/// Runs an open loop to its end on the calling thread. The first slots fall due from the clock's origin on.
pub fn conduct(
    plan: OpenPlan,
    dispatcher: Dispatcher,
    supply: Supply,
    inbox: &Receiver<Message>,
) -> Conducted {
    let phases = Phases { measured_from_ns: ns(plan.warm_up_s), measured_to_ns: ns(plan.duration_s) };
    dispatcher.live.set_measured_from(phases.measured_from_ns);
    let counts = ScheduleCounts {
        planned_slots: Some(0),
        planned_slots_measured: Some(0),
        ..ScheduleCounts::default()
    };
    let mut open = Open {
        slots: Slots::new(plan.rate_per_s, plan.duration_s, plan.arrival, plan.seed),
        turns: Turns::new(plan.num_turns),
        thinking: BinaryHeap::new(),
        thinking_turns: HashMap::new(),
        waiting: VecDeque::new(),
        in_flight: 0,
        outstanding: 0,
        last_turn_sent_in_warm_up: plan.num_turns == 1,
        stopped_at_ns: None,
        plan,
        dispatcher,
        supply,
        phases,
        counts,
    };
    open.run(inbox);
    let mut phases = open.phases;
    if let Some(at_ns) = open.stopped_at_ns {
        phases.measured_to_ns = phases.measured_to_ns.min(at_ns);
    }
    Conducted {
        phases,
        counts: open.counts,
        steady_state_reached: None,
        last_turn_sent_in_warm_up: Some(open.last_turn_sent_in_warm_up),
        is_stopped: open.stopped_at_ns.is_some(),
    }
}

struct Open {
    plan: OpenPlan,
    dispatcher: Dispatcher,
    supply: Supply,
    slots: Slots,
    turns: Turns<Box<Turn>>,
    /// (ready, session number) of turns whose think time is not over.
    thinking: BinaryHeap<Reverse<(i64, u64)>>,
    thinking_turns: HashMap<u64, Box<Turn>>,
    /// Slots over `max_concurrency`: due, and when they began to wait.
    waiting: VecDeque<(i64, i64)>,
    in_flight: u64,
    /// Requests sent whose session has not been heard of since.
    outstanding: u64,
    phases: Phases,
    counts: ScheduleCounts,
    last_turn_sent_in_warm_up: bool,
    stopped_at_ns: Option<i64>,
}

impl Open {
    fn run(&mut self, inbox: &Receiver<Message>) {
        let clock = self.dispatcher.clock;
        let mut next = self.slots.next();
        let mut give_up_ns = None;
        loop {
            while let Ok(message) = inbox.try_recv() {
                self.handle(message);
            }
            self.send_waiting(inbox);
            if self.stopped_at_ns.is_some() {
                next = None;
            }
            self.tell_state(next.is_some());
            if let Some(due_ns) = next {
                if due_ns <= clock.now_ns() {
                    self.slot(due_ns, inbox);
                    next = self.slots.next();
                } else if let Some(message) = hear(inbox, &clock, Some(due_ns)) {
                    self.handle(message);
                }
                continue;
            }
            if self.outstanding == 0 && self.waiting.is_empty() {
                return;
            }
            let deadline = *give_up_ns.get_or_insert_with(|| {
                self.phases.measured_to_ns.max(clock.now_ns()).saturating_add(ns(self.plan.drain_timeout_s))
            });
            let deadline = (!self.dispatcher.abort.is_cancelled()).then_some(deadline);
            match hear(inbox, &clock, deadline) {
                Some(message) => self.handle(message),
                None => self.abort_all(),
            }
        }
    }

    fn tell_state(&self, has_slots: bool) {
        let now_ns = self.dispatcher.clock.now_ns();
        self.dispatcher.live.set_state(if !has_slots {
            State::Draining
        } else if now_ns >= self.phases.measured_from_ns {
            State::Measuring
        } else {
            State::WarmUp
        });
    }

    /// Ends what is in flight; what still waits for a place is never sent.
    fn abort_all(&mut self) {
        self.counts.unsent += self.waiting.len() as u64;
        self.waiting.clear();
        self.dispatcher.abort.cancel();
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Fresh(turn) => self.supply.put(turn),
            Message::Answered { .. } => self.in_flight -= 1,
            Message::Ready { turn, completed_ns } => {
                self.outstanding -= 1;
                let ready_ns = completed_ns.saturating_add(ns(self.plan.think_time_s));
                self.thinking.push(Reverse((ready_ns, turn.session.number)));
                self.thinking_turns.insert(turn.session.number, turn);
            }
            Message::Over { turn, broken, .. } => {
                self.outstanding -= 1;
                self.dispatcher.live.sessions_ended.fetch_add(1, Ordering::Relaxed);
                if broken {
                    // What we ended ourselves is no failure.
                    self.counts.sessions_failed += u64::from(!self.dispatcher.abort.is_cancelled());
                    if turn < self.plan.num_turns {
                        self.turns.lost(turn + 1);
                    }
                } else {
                    self.counts.sessions_completed += 1;
                }
            }
            Message::Stop => {
                if self.stopped_at_ns.is_none() {
                    self.stopped_at_ns = Some(self.dispatcher.clock.now_ns());
                    self.abort_all();
                }
            }
        }
    }

    /// Lets turns whose think time is over join the ready ones.
    fn join_ready(&mut self, now_ns: i64) {
        while let Some(Reverse((ready_ns, number))) = self.thinking.peek().copied() {
            if ready_ns > now_ns {
                return;
            }
            self.thinking.pop();
            let Some(turn) = self.thinking_turns.remove(&number) else { continue };
            if self.turns.join(turn.session.turn, turn, ready_ns).is_err() {
                self.dispatcher.live.sessions_ended.fetch_add(1, Ordering::Relaxed);
                if self.is_measured(ready_ns) {
                    self.counts.cut_short_measured += 1;
                }
            }
        }
    }

    fn is_measured(&self, ns: i64) -> bool {
        (self.phases.measured_from_ns..self.phases.measured_to_ns).contains(&ns)
    }

    fn slot(&mut self, due_ns: i64, inbox: &Receiver<Message>) {
        let is_measured = self.is_measured(due_ns);
        let add = |count: &mut Option<u64>| *count = count.map(|n| n + 1);
        add(&mut self.counts.planned_slots);
        if is_measured {
            add(&mut self.counts.planned_slots_measured);
        }
        if self.in_flight >= u64::from(self.plan.max_in_flight) {
            self.refuse(due_ns);
        } else if !self.waiting.is_empty() || !self.has_place() {
            self.waiting.push_back((due_ns, self.dispatcher.clock.now_ns()));
        } else {
            self.send(due_ns, 0, inbox);
        }
    }

    fn has_place(&self) -> bool {
        self.plan.max_concurrency.is_none_or(|cap| self.in_flight < u64::from(cap))
    }

    fn send_waiting(&mut self, inbox: &Receiver<Message>) {
        while self.has_place() && self.stopped_at_ns.is_none() {
            let Some((due_ns, since_ns)) = self.waiting.pop_front() else { return };
            let waited = self.dispatcher.clock.now_ns() - since_ns;
            self.send(due_ns, u64::try_from(waited).unwrap_or(0), inbox);
        }
    }

    fn refuse(&mut self, due_ns: i64) {
        self.dispatcher.live.refused.fetch_add(1, Ordering::Relaxed);
        let _ = self.dispatcher.records.send(refused(due_ns));
    }

    fn send(&mut self, due_ns: i64, cap_wait_ns: u64, inbox: &Receiver<Message>) {
        let now_ns = self.dispatcher.clock.now_ns();
        self.join_ready(now_ns);
        let turn = match self.turns.slot() {
            Choice::Continue { item, ready_ns, .. } => {
                if self.is_measured(due_ns) {
                    self.counts.ready_waits_ms.push(metric::ms((now_ns - ready_ns).max(0)));
                }
                item
            }
            Choice::Start { beyond_plan } => {
                if beyond_plan && self.is_measured(due_ns) {
                    self.counts.beyond_plan_measured += 1;
                }
                self.counts.sessions_started += 1;
                let Some(turn) = self.fresh(inbox) else {
                    self.counts.sessions_started -= 1;
                    self.counts.unsent += 1;
                    return;
                };
                turn
            }
        };
        let number = turn.session.turn;
        if number == self.plan.num_turns && due_ns < self.phases.measured_from_ns {
            self.last_turn_sent_in_warm_up = true;
        }
        if number < self.plan.num_turns {
            self.turns.heading_for(number + 1);
        }
        self.in_flight += 1;
        self.outstanding += 1;
        self.dispatcher.send(turn, Dispatch { due_ns, cap_wait_ns });
    }

    /// The next session's first turn, awaited when it was not made in time; `None` only when stopped meanwhile.
    fn fresh(&mut self, inbox: &Receiver<Message>) -> Option<Box<Turn>> {
        if let Some(turn) = self.supply.take(&self.dispatcher.prompts) {
            return Some(turn);
        }
        self.counts.prompt_supply_dry += 1;
        loop {
            if self.stopped_at_ns.is_some() {
                return None;
            }
            if let Some(message) = hear(inbox, &self.dispatcher.clock, None) {
                self.handle(message);
            }
            if let Some(turn) = self.supply.take(&self.dispatcher.prompts) {
                return Some(turn);
            }
        }
    }
}

/// The record of a slot over `max_in_flight`, which took no turn.
fn refused(due_ns: i64) -> Record {
    Record {
        session: None,
        turn: None,
        due_ns,
        cap_wait_ns: 0,
        sent_ns: None,
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
        outcome: Outcome::Refused,
        error: None,
        finish_reason: None,
        planned_input_tokens: None,
        input_tokens: None,
        input_tokens_source: None,
        output_tokens: None,
        output_tokens_source: None,
        reasoning_tokens: None,
        cached_tokens: None,
        expected_cached_tokens: None,
        reply_tokens: None,
        new_connection: false,
        resent: false,
    }
}
