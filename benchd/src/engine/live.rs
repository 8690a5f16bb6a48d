//! What can be seen of a run while it goes on: counters that the schedule and the recorder write and `status`
//! reads. Nothing here feeds back into the load or into the report.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering};

use hdrhistogram::Histogram;
use proto::metric;
use proto::record::Record;
use proto::wire::{State, Status};
use tokio::sync::Notify;

use crate::engine::clock::Clock;

/// Seconds over which the live rate and lag are taken.
const LIVE_SECONDS: i64 = 5;

/// Live counters of one run.
#[derive(Debug)]
pub struct Live {
    state: AtomicU8,
    /// Requests sent.
    pub sent: AtomicU64,
    /// Slots refused.
    pub refused: AtomicU64,
    /// Requests whose exchange has ended, aborted ones included.
    pub ended: AtomicU64,
    /// Sessions ended.
    pub sessions_ended: AtomicU64,
    /// First instant of the measured part; `i64::MAX` before it is known.
    measured_from_ns: AtomicI64,
    measured_from_is_known: Notify,
    recorded: Mutex<Recorded>,
}

/// What the recorder alone writes.
#[derive(Debug)]
struct Recorded {
    completed: u64,
    failed: u64,
    measured: u64,
    /// Each of the last seconds: its number, successes, dispatch lags in µs.
    seconds: VecDeque<(i64, u64, Histogram<u32>)>,
}

impl Default for Live {
    fn default() -> Self {
        Live {
            state: AtomicU8::new(0),
            sent: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            sessions_ended: AtomicU64::new(0),
            measured_from_ns: AtomicI64::new(i64::MAX),
            measured_from_is_known: Notify::new(),
            recorded: Mutex::new(Recorded { completed: 0, failed: 0, measured: 0, seconds: VecDeque::new() }),
        }
    }
}

const STATES: [State; 6] =
    [State::Preparing, State::WarmUp, State::Measuring, State::Draining, State::Idle, State::Smoking];

impl Live {
    /// Says what the run is doing.
    pub fn set_state(&self, state: State) {
        let index = STATES.iter().position(|s| *s == state).unwrap_or(0);
        self.state.store(u8::try_from(index).unwrap_or(0), Ordering::Relaxed);
    }

    /// What the run is doing.
    pub fn state(&self) -> State {
        STATES[usize::from(self.state.load(Ordering::Relaxed))]
    }

    /// Says where the measured part begins.
    pub fn set_measured_from(&self, ns: i64) {
        self.measured_from_ns.store(ns, Ordering::Relaxed);
        self.measured_from_is_known.notify_one();
    }

    /// Where the measured part begins, as soon as that is known; for one waiter.
    pub async fn measured_from_ns(&self) -> i64 {
        self.measured_from_is_known.notified().await;
        self.measured_from_ns.load(Ordering::Relaxed)
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> u64 {
        let ended = self.ended.load(Ordering::Relaxed);
        self.sent.load(Ordering::Relaxed).saturating_sub(ended)
    }

    /// Takes a record into the live figures.
    pub fn record(&self, record: &Record, now_ns: i64) {
        let mut recorded = self.lock();
        if record.outcome.is_completion() {
            recorded.completed += 1;
            if record.due_ns >= self.measured_from_ns.load(Ordering::Relaxed) {
                recorded.measured += 1;
            }
        }
        if record.outcome.is_failure() {
            recorded.failed += 1;
        }
        let second = now_ns / 1_000_000_000;
        if recorded.seconds.back().is_none_or(|(s, ..)| *s != second) {
            // Two digits are enough for a live figure, and auto-resizing takes any lag.
            if let Ok(lags) = Histogram::new(2) {
                recorded.seconds.push_back((second, 0, lags));
            }
            while recorded.seconds.front().is_some_and(|(s, ..)| *s < second - LIVE_SECONDS) {
                recorded.seconds.pop_front();
            }
        }
        if let Some((_, successes, lags)) = recorded.seconds.back_mut() {
            *successes += u64::from(record.outcome.is_ok());
            if let Some(lag_ms) = metric::dispatch_lag_ms(record) {
                // A lag is at most the length of the run.
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                let us = (lag_ms.max(0.0) * 1e3) as u64;
                lags.saturating_record(us);
            }
        }
    }

    /// The live figures; target, plan and verdict are filled in by who knows them.
    pub fn status(&self, clock: &Clock) -> Status {
        let now_ns = clock.now_ns();
        let second = now_ns / 1_000_000_000;
        let recorded = self.lock();
        // The current second is not over yet, and at the start there are fewer than wanted.
        let whole: Vec<_> =
            recorded.seconds.iter().filter(|(s, ..)| *s < second && *s >= second - LIVE_SECONDS).collect();
        let span = second.min(LIVE_SECONDS);
        let mut lags: Option<Histogram<u32>> = Histogram::new(2).ok();
        for (_, _, of_second) in &whole {
            if let Some(lags) = &mut lags {
                let _ = lags.add(of_second);
            }
        }
        Status {
            state: self.state(),
            achieved_rate_per_s: (span > 0)
                .then(|| whole.iter().map(|(_, n, _)| *n).sum::<u64>() as f64 / span as f64),
            elapsed_s: metric::seconds(now_ns),
            sent: self.sent.load(Ordering::Relaxed),
            in_flight: self.in_flight(),
            completed: recorded.completed,
            failed: recorded.failed,
            refused: self.refused.load(Ordering::Relaxed),
            measured: recorded.measured,
            sessions_ended: self.sessions_ended.load(Ordering::Relaxed),
            dispatch_lag_p99_ms: lags
                .filter(|l| !l.is_empty())
                .map(|l| l.value_at_quantile(0.99) as f64 / 1e3),
            ..Status::default()
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Recorded> {
        // Counters stay usable whatever panicked while it held them.
        self.recorded.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
