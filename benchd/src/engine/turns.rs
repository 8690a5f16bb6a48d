//! Which turn a slot of the open loop takes: a session's first, or the next one of a session that is ready. Pure; the
//! schedule tells it of sessions on their way and of answers, and asks at every slot.

use std::collections::VecDeque;

/// Slots by which an index may be ahead of its share or behind it. A higher limit would answer a spell in which an
/// index had nothing ready with a burst of that index.
const CREDIT_LIMIT: i32 = 2;
/// Ready sessions that may always wait for the same turn.
const QUEUE_BASE: f64 = 2.0;
/// Ready sessions that may wait beside those, times the root of the number on their way to that turn: three standard
/// deviations of arrivals that are independent of each other.
const QUEUE_SPREAD: f64 = 3.0;

/// The sessions that wait for a slot, by turn, and how much each turn index is owed.
///
/// The obvious policy, the session that is ready first goes first and a new one starts when none is ready, lets
/// sessions march in step: the first second starts R of them, their second turns fill the next second, and so on, so
/// that the server sees one turn index at a time: short prompts without cache, then long cached ones, in waves. Here
/// every turn index earns 1/n of a slot at each slot and pays 1 when it is served, so that the mix is even at all times.
///
/// - A slot goes to the index with the most credit (ties: lowest). Index 1 starts a session. When no session is ready
///   for that index, the slot goes to the index with the most credit of those that have one ready; when none is ready
///   at all, to a new session. A slot is always used: a slow server does not lower the rate.
/// - A session that starts before its time is a loan, paid back by starting none while others are ready. What exceeds
///   the limit on the debt is forgiven, and adds up to the sessions *beyond plan*: starts over one in n slots. A server
///   that answers between two slots causes loans all the time, and none beyond plan.
/// - Credit stays within two slots on both sides.
/// - A ready session for whose turn too many wait already is turned away. This drains what a slow spell left behind,
///   and bounds how long ready sessions wait.
///
/// A session that is waiting is in here; one in flight or thinking is with the caller, and is only counted here, from
/// [`Turns::heading_for`] to [`Turns::join`] or [`Turns::lost`].
#[derive(Clone, Debug)]
pub struct Turns<T> {
    /// By turn, from 1; in n-ths of a slot, so that all is exact.
    credits: Vec<i32>,
    /// By turn, from 1; nothing ever waits for turn 1.
    queues: Vec<Queue<T>>,
    waiting: usize,
    /// Debt of index 1 that was forgiven and is not reported yet, in n-ths of a session.
    surplus: i32,
}

/// Sessions whose next turn is the same.
#[derive(Clone, Debug)]
struct Queue<T> {
    /// Item and the instant it was ready at, oldest first.
    ready: VecDeque<(T, i64)>,
    /// Sessions in flight or thinking that want this turn next.
    heading: u32,
}

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice<T> {
    /// The first turn of a new session.
    Start {
        /// This start makes the sessions exceed one in n slots by one more, because no session was ready.
        beyond_plan: bool,
    },
    /// A later turn of a session that waited.
    Continue {
        /// From 2.
        turn: u32,
        /// As given to [`Turns::join`].
        item: T,
        /// As given to [`Turns::join`].
        ready_ns: i64,
    },
}

impl<T> Turns<T> {
    /// No sessions, no credit. `num_turns` is taken to be at least 1.
    #[must_use]
    pub fn new(num_turns: u32) -> Self {
        let n = index(num_turns.max(1)) + 1;
        Turns {
            credits: vec![0; n],
            queues: (0..n).map(|_| Queue { ready: VecDeque::new(), heading: 0 }).collect(),
            waiting: 0,
            surplus: 0,
        }
    }

    /// What the slot that is due now is used for. Takes time in proportion to the number of turns, well below a
    /// microsecond up to 100.
    pub fn slot(&mut self) -> Choice<T> {
        let whole = self.slot_credit();
        for credit in &mut self.credits {
            *credit = (*credit + 1).min(CREDIT_LIMIT * whole);
        }
        let want = self.most_credit(|_| true).unwrap_or(0);
        let chosen = match want {
            0 => 0,
            _ if !self.queues[want].ready.is_empty() => want,
            _ if self.waiting == 0 => 0,
            _ => self.most_credit(|queue| !queue.ready.is_empty()).unwrap_or(0),
        };
        let owed = self.credits[chosen] - whole;
        self.credits[chosen] = owed.max(-CREDIT_LIMIT * whole);
        if let Some((item, ready_ns)) = self.queues[chosen].ready.pop_front() {
            self.waiting -= 1;
            return Choice::Continue { turn: turn(chosen), item, ready_ns };
        }
        // What the limit forgives index 1 is what its starts exceed their share by.
        self.surplus += self.credits[0] - owed;
        let beyond_plan = self.surplus >= whole;
        if beyond_plan {
            self.surplus -= whole;
        }
        Choice::Start { beyond_plan }
    }

    /// A session was sent on its turn `turn − 1` and will want `turn`.
    ///
    /// # Panics
    /// When a session has no turn `turn`, here and below: turns are counted from 1.
    pub fn heading_for(&mut self, turn: u32) {
        self.queues[index(turn)].heading += 1;
    }

    /// A session that was heading for `turn` failed or was stopped on the way.
    pub fn lost(&mut self, turn: u32) {
        let queue = &mut self.queues[index(turn)];
        debug_assert!(queue.heading > 0, "lost for turn {turn} without heading_for");
        queue.heading = queue.heading.saturating_sub(1);
    }

    /// A session that was heading for `turn` is ready for it.
    ///
    /// # Errors
    /// Gives the item back when too many wait for that turn already: its session ends here, cut short.
    pub fn join(&mut self, turn: u32, item: T, ready_ns: i64) -> Result<(), T> {
        self.lost(turn);
        let queue = &mut self.queues[index(turn)];
        if queue.is_full() {
            return Err(item);
        }
        queue.ready.push_back((item, ready_ns));
        self.waiting += 1;
        Ok(())
    }

    /// Sessions that are ready and wait for a slot.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// The credit of one slot.
    fn slot_credit(&self) -> i32 {
        i32::try_from(self.credits.len()).expect("a plan has at most 10,000 turns")
    }

    /// The index with the most credit, the lowest of several, among those whose queue is `eligible`.
    fn most_credit(&self, eligible: impl Fn(&Queue<T>) -> bool) -> Option<usize> {
        let mut best: Option<(usize, i32)> = None;
        for (i, &credit) in self.credits.iter().enumerate() {
            if best.is_none_or(|(_, most)| credit > most) && eligible(&self.queues[i]) {
                best = Some((i, credit));
            }
        }
        best.map(|(i, _)| i)
    }
}

impl<T> Queue<T> {
    fn is_full(&self) -> bool {
        let limit = QUEUE_BASE + QUEUE_SPREAD * f64::from(self.heading).sqrt();
        u32::try_from(self.ready.len()).is_ok_and(|waiting| f64::from(waiting) >= limit)
    }
}

fn index(turn: u32) -> usize {
    (turn - 1) as usize
}

fn turn(index: usize) -> u32 {
    u32::try_from(index + 1).expect("made from a u32")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;
    use rand_distr::{Distribution, LogNormal};
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    #[test]
    fn a_server_that_never_answers_gets_a_session_a_slot_and_all_but_one_in_n_are_beyond_plan() {
        let mut turns: Turns<()> = Turns::new(4);
        let beyond = (0..4000).filter(|_| turns.slot() == Choice::Start { beyond_plan: true }).count();
        // The debt at the end, at most two sessions, is not forgiven yet.
        assert!((2998..=3000).contains(&beyond), "{beyond}");
    }

    #[test]
    fn a_session_of_one_turn_only_starts() {
        let mut turns: Turns<()> = Turns::new(1);
        assert!((0..100).all(|_| turns.slot() == Choice::Start { beyond_plan: false }));
    }

    #[test]
    fn sessions_of_the_same_turn_go_oldest_first() {
        let mut turns = Turns::new(2);
        for item in ["a", "b"] {
            turns.heading_for(2);
            assert_eq!(turns.join(2, item, 7), Ok(()));
        }
        assert_eq!(turns.waiting(), 2);
        assert_eq!(turns.slot(), Choice::Start { beyond_plan: false });
        assert_eq!(turns.slot(), Choice::Continue { turn: 2, item: "a", ready_ns: 7 });
        assert_eq!(turns.slot(), Choice::Start { beyond_plan: false });
        assert_eq!(turns.slot(), Choice::Continue { turn: 2, item: "b", ready_ns: 7 });
        assert_eq!(turns.waiting(), 0);
    }

    #[test]
    fn an_empty_turn_gives_its_slot_to_the_waiting_one_with_the_most_credit() {
        let mut turns = Turns::new(3);
        turns.heading_for(3);
        turns.join(3, (), 0).unwrap();
        assert_eq!(turns.slot(), Choice::Start { beyond_plan: false });
        // Turn 2 has as much credit as 3 and is lower, but nobody is ready for it.
        assert_eq!(turns.slot(), Choice::Continue { turn: 3, item: (), ready_ns: 0 });
    }

    #[test]
    fn a_session_is_cut_short_where_too_many_wait() {
        let mut turns = Turns::new(2);
        (0..10).for_each(|_| turns.heading_for(2));
        // The eighth finds seven waiting and two on their way: 2 + 3·√2 is 6.2. The seventh found 6, and 2 + 3·√3.
        let taken = (0..10).take_while(|&i| turns.join(2, i, 0).is_ok()).count();
        assert_eq!((taken, turns.waiting()), (7, 7));
    }

    #[test]
    fn a_lost_session_no_longer_counts_as_on_its_way() {
        let mut turns = Turns::new(2);
        (0..100).for_each(|_| turns.heading_for(2));
        (0..97).for_each(|_| turns.lost(2));
        assert_eq!((0..3).filter(|&i| turns.join(2, i, 0).is_ok()).count(), 2);
    }

    /// One run in virtual time, without think time: slots at constant spacing, answers after a time that is drawn.
    #[derive(Clone, Copy)]
    struct Simulation {
        rate_per_s: u32,
        num_turns: u32,
        warm_up_s: u32,
        measured_s: u32,
        mean_s: f64,
        /// Sigma of the lognormal time; 0: constant.
        sigma: f64,
        /// Every so many requests one fails; 0: none.
        fail_every: u64,
        seed: u64,
    }

    #[derive(Default)]
    struct Outcome {
        /// Due instant in ns and turn of each measured slot.
        sent: Vec<(i64, u32)>,
        started: u64,
        completed: u64,
        failed: u64,
        cut_short: u64,
        beyond_plan: u64,
        alive: u64,
        waits_s: Vec<f64>,
        /// At the end, as the policy counts them and as the simulation does.
        heading: u64,
        in_flight_before_last: u64,
    }

    const STEADY: Simulation = Simulation {
        rate_per_s: 50,
        num_turns: 4,
        warm_up_s: 5,
        measured_s: 15,
        mean_s: 0.65,
        sigma: 0.0,
        fail_every: 0,
        seed: 1,
    };

    impl Simulation {
        fn run(&self) -> Outcome {
            let mut turns = Turns::new(self.num_turns);
            let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
            let time = LogNormal::new(self.mean_s.ln() - self.sigma.powi(2) / 2.0, self.sigma).unwrap();
            // Completion, session, the turn that was in flight.
            let mut in_flight: BinaryHeap<Reverse<(i64, u64, u32)>> = BinaryHeap::new();
            let mut out = Outcome::default();
            let mut requests = 0_u64;
            let slots = i64::from(self.rate_per_s) * i64::from(self.warm_up_s + self.measured_s);
            for i in 0..slots {
                let due = i * 1_000_000_000 / i64::from(self.rate_per_s);
                let measured = due >= i64::from(self.warm_up_s) * 1_000_000_000;
                while let Some(&Reverse((at, session, turn))) = in_flight.peek() {
                    if at > due {
                        break;
                    }
                    in_flight.pop();
                    requests += 1;
                    let failed = self.fail_every > 0 && requests.is_multiple_of(self.fail_every);
                    if failed {
                        out.failed += 1;
                    } else if turn == self.num_turns {
                        out.completed += 1;
                    }
                    if turn < self.num_turns {
                        if failed {
                            turns.lost(turn + 1);
                        } else if turns.join(turn + 1, session, at).is_err() {
                            out.cut_short += 1;
                        }
                    }
                }
                let (session, turn) = match turns.slot() {
                    Choice::Start { beyond_plan } => {
                        out.started += 1;
                        out.beyond_plan += u64::from(beyond_plan && measured);
                        (out.started, 1)
                    }
                    Choice::Continue { turn, item, ready_ns } => {
                        if measured {
                            out.waits_s.push((due - ready_ns) as f64 / 1e9);
                        }
                        (item, turn)
                    }
                };
                if turn < self.num_turns {
                    turns.heading_for(turn + 1);
                }
                #[expect(clippy::cast_possible_truncation, reason = "some seconds, rounded")]
                let time_ns = (time.sample(&mut rng) * 1e9).round() as i64;
                in_flight.push(Reverse((due + time_ns, session, turn)));
                if measured {
                    out.sent.push((due, turn));
                }
            }
            out.heading = turns.queues.iter().map(|q| u64::from(q.heading)).sum();
            out.in_flight_before_last = in_flight.iter().filter(|r| r.0.2 < self.num_turns).count() as u64;
            out.alive = (in_flight.len() + turns.waiting()) as u64;
            out
        }
    }

    impl Outcome {
        /// Share of each turn, the first at index 0.
        fn shares(sent: &[(i64, u32)], num_turns: u32) -> Vec<f64> {
            let of = |turn| sent.iter().filter(|s| s.1 == turn).count() as f64 / sent.len() as f64;
            (1..=num_turns).map(of).collect()
        }

        /// Lowest and highest share of any turn in any 2 s, by steps of a tenth of a second.
        fn extremes(&self, num_turns: u32) -> (f64, f64) {
            let (first, last) = (self.sent[0].0, self.sent[self.sent.len() - 1].0);
            let mut from = first;
            let (mut low, mut high) = (1.0_f64, 0.0_f64);
            while from + 1_990_000_000 <= last {
                let a = self.sent.partition_point(|s| s.0 < from);
                let b = self.sent.partition_point(|s| s.0 < from + 2_000_000_000);
                for share in Self::shares(&self.sent[a..b], num_turns) {
                    (low, high) = (low.min(share), high.max(share));
                }
                from += 100_000_000;
            }
            (low, high)
        }

        /// Each turn within a point of its share over all, within the band in any 2 s, and the ISL within a share.
        fn check_mix(&self, band: std::ops::RangeInclusive<f64>, isl_band: f64) {
            let shares = Self::shares(&self.sent, 4);
            assert!(shares.iter().all(|s| (s - 0.25).abs() <= 0.01), "{shares:?}");
            let (low, high) = self.extremes(4);
            assert!(band.contains(&low) && band.contains(&high), "from {low} to {high} in 2 s");
            // What a workload of isl 1000 and osl 100 has in its four turns.
            let isl: f64 = shares.iter().zip([340.0, 780.0, 1220.0, 1660.0]).map(|(s, t)| s * t).sum();
            assert!((isl / 1000.0 - 1.0).abs() <= isl_band, "ISL {isl}");
        }
    }

    /// The runs that the design's claims are about.
    fn claimed() -> [Simulation; 3] {
        [
            STEADY,
            Simulation { rate_per_s: 300, ..STEADY },
            Simulation { mean_s: 4.0, warm_up_s: 14, measured_s: 20, ..STEADY },
        ]
    }

    #[test]
    fn every_2_s_have_an_even_mix_of_turns() {
        for simulation in claimed() {
            simulation.run().check_mix(0.18..=0.32, 0.005);
        }
    }

    #[test]
    fn answers_that_take_very_different_times_leave_the_mix_even() {
        for simulation in claimed() {
            for seed in 1..=20 {
                Simulation { sigma: 0.5, seed, ..simulation }.run().check_mix(0.15..=0.35, 0.01);
            }
        }
    }

    #[test]
    fn a_fast_server_causes_no_session_beyond_plan() {
        // Answers come between two slots or soon after, so that there is often nobody to send.
        for mean_s in [0.001, 0.03, 0.05, 0.1] {
            let out = Simulation { mean_s, ..STEADY }.run();
            out.check_mix(0.18..=0.32, 0.005);
            assert_eq!(out.beyond_plan, 0, "at {mean_s} s");
        }
    }

    #[test]
    fn a_server_that_is_too_slow_lowers_neither_the_rate_nor_hides_it() {
        let out = Simulation { mean_s: 60.0, ..STEADY }.run();
        assert_eq!(out.sent.len(), 50 * 15);
        assert!(out.sent.iter().all(|&(_, turn)| turn == 1));
        let (planned, started) = (out.sent.len() as u64 / 4, out.sent.len() as u64);
        assert!(out.beyond_plan.abs_diff(started - planned) <= 2, "{}", out.beyond_plan);
    }

    #[test]
    fn ready_sessions_wait_no_longer_than_the_queue_is_long() {
        for simulation in claimed() {
            let out = simulation.run();
            // On their way to a turn: rate / n · time. Served at rate / n.
            let rate = f64::from(simulation.rate_per_s) / 4.0;
            let bound = (QUEUE_BASE + 1.0 + QUEUE_SPREAD * (rate * simulation.mean_s * 2.0).sqrt()) / rate;
            let longest = out.waits_s.iter().copied().fold(0.0, f64::max);
            assert!(longest <= bound, "{longest} s, bound {bound} s");
        }
    }

    proptest! {
        #[test]
        fn every_session_ends_once_or_is_alive(rate_per_s in 1..200_u32, num_turns in 1..12_u32,
            mean_s in 0.001..5.0, sigma in 0.0..1.5, fail_every in 0..20_u64, seed: u64)
        {
            let out = Simulation { rate_per_s, num_turns, mean_s, sigma, fail_every, seed, ..STEADY }.run();
            prop_assert_eq!(out.started, out.completed + out.failed + out.cut_short + out.alive);
            prop_assert_eq!(out.sent.len() as u64, u64::from(rate_per_s) * 15);
            // All that counts as on its way is in flight.
            prop_assert_eq!(out.heading, out.in_flight_before_last);
            if num_turns == 1 {
                prop_assert_eq!(out.beyond_plan, 0);
            }
        }
    }
}
