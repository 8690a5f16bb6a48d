//! Keeps the records of a run, on a thread of its own: takes them in the order in which they are settled, shows them
//! to the live counters and to whoever follows failures, stops a run in which too many fail, and gives all of them
//! back at the end.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Receiver;
use proto::plan::{ERROR_RATE_FROM, Plan};
use proto::record::Record;
use tokio_util::sync::CancellationToken;

use crate::engine::clock::Clock;
use crate::engine::live::Live;
use crate::engine::observer::Observer;

/// What a run leaves.
#[derive(Debug)]
pub struct Recorded {
    /// One for each slot or turn.
    pub records: Vec<Record>,
    /// Whether the run was stopped because too many failed.
    pub error_limit_reached: bool,
}

/// Failures that a run may have.
#[derive(Clone, Copy, Debug)]
pub struct ErrorLimit {
    max_errors: Option<u64>,
    max_error_rate: Option<f64>,
    completed: u64,
    failed: u64,
}

impl ErrorLimit {
    /// The limit of a plan.
    pub fn of(plan: &Plan) -> Self {
        let Plan { max_errors, max_error_rate, .. } = plan;
        ErrorLimit { max_errors: *max_errors, max_error_rate: *max_error_rate, completed: 0, failed: 0 }
    }

    /// Counts a record; says whether the limit is crossed.
    fn is_crossed_with(&mut self, record: &Record) -> bool {
        self.completed += u64::from(record.outcome.is_completion());
        self.failed += u64::from(record.outcome.is_failure());
        let rate = self.failed as f64 / self.completed.max(1) as f64;
        self.max_errors.is_some_and(|most| self.failed > most)
            || (self.completed >= ERROR_RATE_FROM && self.max_error_rate.is_some_and(|most| rate > most))
    }
}

/// Starts the thread; it ends when the last sender of `inbox` is gone.
pub fn start(
    inbox: Receiver<Record>,
    mut limit: ErrorLimit,
    stop: CancellationToken,
    clock: Clock,
    live: Arc<Live>,
    observer: Observer,
) -> std::io::Result<JoinHandle<Recorded>> {
    std::thread::Builder::new().name("recorder".to_owned()).spawn(move || {
        let mut recorded = Recorded { records: Vec::new(), error_limit_reached: false };
        for record in inbox {
            live.record(&record, clock.now_ns());
            if record.outcome.is_failure() {
                observer.failure(&record);
            }
            // A run that is being stopped already ends for another reason.
            if limit.is_crossed_with(&record) && !stop.is_cancelled() {
                recorded.error_limit_reached = true;
                stop.cancel();
            }
            recorded.records.push(record);
        }
        recorded
    })
}
