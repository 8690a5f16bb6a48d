//! What the engine says while it works, to whoever started it: notices, failures. A run never waits for a reader.

use proto::record::Record;
use tokio::sync::mpsc;

/// Failures that may wait for their reader; beyond, they are only counted (the records hold all of them).
const QUEUE: usize = 1024;

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Said {
    /// A sentence for people.
    Notice(String),
    /// A request failed.
    Failure(Box<Record>),
    /// The prefix of this run's session ids.
    SessionPrefix(String),
}

/// The speaking end.
#[derive(Clone, Debug)]
pub struct Observer {
    to: mpsc::Sender<Said>,
}

impl Observer {
    /// An observer and the end to listen at.
    pub fn new() -> (Self, mpsc::Receiver<Said>) {
        let (to, from) = mpsc::channel(QUEUE);
        (Observer { to }, from)
    }

    /// Says a sentence.
    pub fn notice(&self, text: impl Into<String>) {
        let _ = self.to.try_send(Said::Notice(text.into()));
    }

    /// Tells the prefix of this run's session ids.
    pub fn session_prefix(&self, prefix: &str) {
        let _ = self.to.try_send(Said::SessionPrefix(prefix.to_owned()));
    }

    /// Tells of a failure.
    pub fn failure(&self, record: &Record) {
        let _ = self.to.try_send(Said::Failure(Box::new(record.clone())));
    }
}
