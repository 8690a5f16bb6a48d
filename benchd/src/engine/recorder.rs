//! Keeps the records of a run, on a thread of its own: takes them in the order in which they are settled, shows them
//! to the live counters and to whoever follows failures, and gives all of them back at the end.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Receiver;
use proto::record::Record;

use crate::engine::clock::Clock;
use crate::engine::live::Live;
use crate::engine::observer::Observer;

/// Starts the thread; it ends when the last sender of `inbox` is gone.
pub fn start(
    inbox: Receiver<Record>,
    clock: Clock,
    live: Arc<Live>,
    observer: Observer,
) -> std::io::Result<JoinHandle<Vec<Record>>> {
    std::thread::Builder::new().name("recorder".to_owned()).spawn(move || {
        let mut records = Vec::new();
        for record in inbox {
            live.record(&record, clock.now_ns());
            if record.outcome.is_failure() {
                observer.failure(&record);
            }
            records.push(record);
        }
        records
    })
}
