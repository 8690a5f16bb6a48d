//! The instrument watches itself during a run: how late its runtime's threads come back to what waits for them, the
//! CPU time of its threads, and what the machine took away from it. A thread of its own, and one heartbeat for each
//! thread of the runtime; the summary sets what they found beside the requests.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use proto::wire::State;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::engine::clock::Clock;
use crate::engine::live::Live;
use crate::engine::machine::{Snapshot, Usage};

/// Time between two beats of a heart.
const BEAT: Duration = Duration::from_millis(5);
/// A beat that comes later than this is a stall.
const STALL: Duration = Duration::from_millis(10);
/// Stalls that are kept one by one; later ones lengthen the last, so that no time is lost.
const MAX_STALLS: usize = 100_000;
/// Time between two looks at CPU times.
const LOOK: Duration = Duration::from_millis(500);

/// Time in which a runtime thread did not come back to what waited for it. Instants are ns of the run's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// When it should have come back.
    pub from_ns: i64,
    /// When it did.
    pub to_ns: i64,
}

/// What was seen of ourselves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Watched {
    /// Stalls, by their beginnings, none within another.
    pub stalls: Vec<Stall>,
    /// CPU over the measured part, or over the load when there is none; absent where the system does not tell, and for
    /// runs of under a second.
    pub usage: Option<Usage>,
}

/// A watch that goes on.
#[derive(Debug)]
pub struct Watch {
    stalls: Arc<Mutex<Vec<Stall>>>,
    hearts: CancellationToken,
    looks: JoinHandle<Option<Usage>>,
    end: Sender<()>,
}

impl Watch {
    /// Begins.
    pub fn start(runtime: &tokio::runtime::Handle, clock: Clock, live: Arc<Live>) -> std::io::Result<Self> {
        let stalls: Arc<Mutex<Vec<Stall>>> = Arc::default();
        let hearts = CancellationToken::new();
        for _ in 0..runtime.metrics().num_workers() {
            runtime.spawn(hearts.clone().run_until_cancelled_owned(beat(clock, stalls.clone())));
        }
        let (end, ended) = bounded(0);
        let looks = std::thread::Builder::new().name("watch".to_owned()).spawn(move || {
            let mut looks = Looks::default();
            while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                looks.look(live.state());
            }
            looks.usage()
        })?;
        Ok(Watch { stalls, hearts, looks, end })
    }

    /// Ends, and tells what was seen.
    pub fn finish(self) -> Watched {
        self.hearts.cancel();
        drop(self.end);
        // A watch that failed has seen nothing; the run's figures do not depend on it.
        let usage = self.looks.join().unwrap_or(None);
        let mut stalls = std::mem::take(&mut *lock(&self.stalls));
        stalls.sort_by_key(|stall| stall.from_ns);
        stalls.dedup_by(|later, earlier| {
            let is_within = later.from_ns <= earlier.to_ns;
            if is_within {
                earlier.to_ns = earlier.to_ns.max(later.to_ns);
            }
            is_within
        });
        Watched { stalls, usage }
    }
}

fn lock(stalls: &Mutex<Vec<Stall>>) -> std::sync::MutexGuard<'_, Vec<Stall>> {
    stalls.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn beat(clock: Clock, stalls: Arc<Mutex<Vec<Stall>>>) {
    let mut beats = tokio::time::interval(BEAT);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let due = beats.tick().await;
        let late = Instant::now().saturating_duration_since(due);
        if late > STALL {
            let to_ns = clock.now_ns();
            let from_ns = to_ns - i64::try_from(late.as_nanos()).unwrap_or(i64::MAX);
            let mut stalls = lock(&stalls);
            let is_full = stalls.len() >= MAX_STALLS;
            match stalls.last_mut() {
                Some(last) if is_full => last.to_ns = to_ns,
                _ => stalls.push(Stall { from_ns, to_ns }),
            }
        }
    }
}

/// CPU times at the ends of the part that counts.
#[derive(Default)]
struct Looks {
    first: Option<Snapshot>,
    /// First of the measured part.
    measured: Option<Snapshot>,
    /// Last before the drain, or last of all.
    last: Option<Snapshot>,
}

impl Looks {
    fn look(&mut self, state: State) {
        if state == State::Draining && self.measured.is_some() {
            return;
        }
        let Some(now) = Snapshot::take() else { return };
        if self.first.is_none() {
            self.first = Some(now);
        } else if state == State::Measuring && self.measured.is_none() {
            self.measured = Some(now);
        } else {
            self.last = Some(now);
        }
    }

    fn usage(self) -> Option<Usage> {
        let from = self.measured.or(self.first)?;
        let to = self.last?;
        Usage::between(&from, &to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(runtime: &tokio::runtime::Runtime) -> (Watch, Clock) {
        let clock = Clock::start();
        (Watch::start(runtime.handle(), clock, Arc::new(Live::default())).unwrap(), clock)
    }

    #[test]
    fn a_thread_that_is_kept_from_its_work_stalls_for_that_time() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (watch, clock) = watch(&runtime);
        let (from_ns, to_ns) = runtime
            .block_on(runtime.spawn(async move {
                // A heart must have begun to beat before it can miss a beat.
                tokio::time::sleep(Duration::from_millis(20)).await;
                let from_ns = clock.now_ns();
                std::thread::sleep(Duration::from_millis(60));
                let to_ns = clock.now_ns();
                tokio::time::sleep(Duration::from_millis(20)).await;
                (from_ns, to_ns)
            }))
            .unwrap();
        let stalls = watch.finish().stalls;
        // The beat that was missed was due at most one beat, and a timer's millisecond, after the thread was taken.
        let covers = |s: &Stall| s.from_ns <= from_ns + 6_000_000 && s.to_ns >= to_ns;
        assert!(stalls.iter().any(covers), "{stalls:?} of {from_ns} to {to_ns}");
    }

    #[test]
    fn stalls_within_each_other_are_one() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (watch, _) = watch(&runtime);
        let stall = |from_ns, to_ns| Stall { from_ns, to_ns };
        lock(&watch.stalls).extend([stall(50, 70), stall(10, 30), stall(12, 20), stall(25, 40)]);
        assert_eq!(watch.finish().stalls, [stall(10, 40), stall(50, 70)]);
    }
}
