//! Whether a server that falls behind is called not steady, and one that keeps up is not: runs of a simulated queue with
//! so many servers that each take the same time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use proto::plan::{Arrival, Load};
use proto::record::{Phases, Record};
use proto::report::ReasonKind;
use rand::RngExt;
use rand_distr::Exp1;

use super::{MS, S, answered, open_loop, run, with_events};
use crate::engine::seeded;
use crate::engine::summary::summarize;

const RATE_PER_S: f64 = 100.0;

/// An open loop against a queue.
#[derive(Clone, Copy)]
struct Queue {
    servers: usize,
    service_ms: i64,
    is_poisson: bool,
    warm_up_s: i64,
    duration_s: i64,
    /// Requests that the servers have to answer at first, due before the run.
    left_over: usize,
    /// Most in flight at once.
    cap: Option<usize>,
}

impl Queue {
    /// That can answer so many a second.
    fn of_capacity(per_s: i64, service_ms: i64) -> Queue {
        let servers = usize::try_from(per_s * service_ms / 1000).unwrap();
        Queue {
            servers,
            service_ms,
            is_poisson: false,
            warm_up_s: 0,
            duration_s: 10,
            left_over: 0,
            cap: None,
        }
    }

    fn records(self, seed: u64) -> Vec<Record> {
        let mut rng = seeded(seed, "steadiness");
        let mut free: BinaryHeap<Reverse<i64>> = (0..self.servers).map(|_| Reverse(0)).collect();
        let mut completed: Vec<i64> = Vec::new();
        let mut records = Vec::new();
        let mut due_s = 0.0;
        let left_over = (0..self.left_over).map(|_| 0);
        let slots = std::iter::from_fn(|| {
            let gap: f64 = if self.is_poisson { rng.sample(Exp1) } else { 1.0 };
            due_s += gap / RATE_PER_S;
            #[allow(clippy::cast_possible_truncation)]
            (due_s < self.duration_s as f64).then_some((due_s * 1e9) as i64)
        });
        for (i, due_ns) in left_over.chain(slots).enumerate() {
            // Under a cap, a request goes out when so many fewer have not been answered; answers come in order.
            let place_ns = self.cap.and_then(|cap| completed.get(i.checked_sub(cap)?)).copied().unwrap_or(0);
            let sent_ns = due_ns.max(place_ns);
            let Reverse(free_ns) = free.pop().unwrap();
            let done_ns = sent_ns.max(free_ns) + self.service_ms * MS;
            free.push(Reverse(done_ns));
            completed.push(done_ns);
            let turn = u32::try_from(i % 2).unwrap() + 1;
            let mut record = with_events(answered(turn, due_ns), done_ns - 9 * MS, &[1; 9]);
            record.sent_ns = Some(sent_ns);
            record.cap_wait_ns = (sent_ns - due_ns).unsigned_abs();
            records.push(record);
        }
        records
    }

    /// What the report says of the server.
    fn reasons(self, seed: u64) -> Vec<String> {
        let mut data = run(self.records(seed));
        data.config.load = open_loop(RATE_PER_S);
        if let Load::Open { arrival, .. } = &mut data.config.load {
            *arrival = if self.is_poisson { Arrival::Poisson } else { Arrival::Constant };
        }
        data.phases = Phases { measured_from_ns: self.warm_up_s * S, measured_to_ns: self.duration_s * S };
        data.steady_state_reached = None;
        let reasons = summarize(&data).verdict.reasons;
        let of_server = reasons.into_iter().filter(|r| r.kind == ReasonKind::Server);
        of_server.map(|r| format!("{}: {}", r.code, r.text)).collect()
    }

    /// With both kinds of arrivals, at several lengths, with and without warm-up; and seeds to try each with.
    fn variants(self) -> Vec<(Queue, u64)> {
        let lengths = [(0, 10), (2, 12), (5, 25)];
        // A queue at constant spacing is the same each time.
        let seeds = 20;
        lengths
            .into_iter()
            .flat_map(|(warm_up_s, duration_s)| {
                let queue = Queue { warm_up_s, duration_s, ..self };
                [(queue, 1), (Queue { is_poisson: true, ..queue }, seeds)]
            })
            .collect()
    }
}

/// Of servers with few places or many.
const SERVICES_MS: [i64; 3] = [50, 300, 2000];

#[test]
fn a_server_of_80_a_second_under_100_is_never_called_steady() {
    for service_ms in SERVICES_MS {
        for (queue, seeds) in Queue::of_capacity(80, service_ms).variants() {
            for seed in 0..seeds {
                let reasons = queue.reasons(seed);
                assert_eq!(reasons.len(), 1, "{service_ms} ms, seed {seed}, {} s", queue.duration_s);
                let (_, growth) = reasons[0].split_once("its queue grew by ").expect(&reasons[0]);
                let growth: f64 = growth.split_once(" requests a second").unwrap().0.parse().unwrap();
                let off = (growth - 20.0).abs();
                // Arrivals at random move a short run's rate itself; the first answers of a slow server come late.
                assert!(off < if queue.duration_s > 20 { 8.0 } else { 20.0 }, "{}", reasons[0]);
            }
        }
    }
}

#[test]
fn a_server_of_120_a_second_under_100_is_always_called_steady() {
    for service_ms in SERVICES_MS {
        for (queue, seeds) in Queue::of_capacity(120, service_ms).variants() {
            for seed in 0..seeds {
                let reasons = queue.reasons(seed);
                assert!(
                    reasons.is_empty(),
                    "{service_ms} ms, seed {seed}, {} s: {reasons:?}",
                    queue.duration_s
                );
            }
        }
    }
}

#[test]
fn a_cap_does_not_hide_a_server_that_falls_behind() {
    let capped = |per_s| Queue { cap: Some(20), ..Queue::of_capacity(per_s, 200) };
    assert!(capped(80).reasons(1)[0].contains("its queue grew by 20."), "{:?}", capped(80).reasons(1));
    assert_eq!(capped(120).reasons(1), [""; 0]);
}

#[test]
fn a_server_that_works_off_what_came_before_is_called_not_steady_too() {
    let recovering = |left_over| Queue { left_over, duration_s: 10, ..Queue::of_capacity(120, 200) };
    // 150 over 10 s are 20 a second less for 7.5 s.
    let reasons = recovering(150).reasons(1);
    assert!(reasons[0].contains("still catching up: its queue shrank by 1"), "{reasons:?}");
    assert_eq!(recovering(10).reasons(1), [""; 0]);
}
