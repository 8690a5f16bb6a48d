//! When turns go out: the pacer thread, which alone owns the sessions that wait. `open` paces slots, `closed` keeps
//! sessions active; both hand turns to exchanges through [`Dispatcher`] and hear back by [`Message`]s.

pub mod closed;
pub mod open;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::{Receiver, Sender};
use proto::record::{Phases, Record};
use tokio_util::sync::CancellationToken;

use crate::engine::clock::Clock;
use crate::engine::exchange::exchange;
use crate::engine::live::Live;
use crate::engine::prompts::{Answer, FirstTurn, Prompts};
use crate::engine::run_data::ScheduleCounts;
use crate::engine::server::Server;
use crate::engine::session::{Dispatch, Turn};

/// What the pacer hears.
#[derive(Debug)]
pub enum Message {
    /// A first turn was made.
    Fresh(Box<Turn>),
    /// An exchange ended: its place is free.
    Answered {
        /// When, in ns of the run's clock.
        at_ns: i64,
    },
    /// An answered session's next turn was made.
    Ready {
        /// The turn.
        turn: Box<Turn>,
        /// Completion of the turn before it.
        completed_ns: i64,
    },
    /// A session has ended.
    Over {
        /// Session number.
        number: u64,
        /// Its last turn.
        turn: u32,
        /// Whether that turn failed or was aborted.
        broken: bool,
        /// Its completion; absent when it was aborted.
        at_ns: Option<i64>,
    },
    /// End the run: no new requests, and those in flight are aborted.
    Stop,
}

/// What the pacer found out.
#[derive(Debug)]
pub struct Conducted {
    /// Where the phases lie.
    pub phases: Phases,
    /// Counts.
    pub counts: ScheduleCounts,
    /// Closed loop: whether warm-up ended by the rule.
    pub steady_state_reached: Option<bool>,
    /// Open loop: whether some last turn was sent before warm-up ended.
    pub last_turn_sent_in_warm_up: Option<bool>,
    /// Whether it was stopped.
    pub is_stopped: bool,
}

/// All that the pacer needs of the rest of a run.
#[derive(Debug)]
pub struct Dispatcher {
    /// The run's clock.
    pub clock: Clock,
    /// Where exchanges run.
    pub runtime: tokio::runtime::Handle,
    /// The server.
    pub server: Arc<Server>,
    /// The prompt threads.
    pub prompts: Prompts,
    /// The recorder, for slots that never become a request.
    pub records: Sender<Record>,
    /// Live counters.
    pub live: Arc<Live>,
    /// Ends every exchange.
    pub abort: CancellationToken,
    /// The pacer's own mailbox, for exchanges to write to.
    pub to_pacer: Sender<Message>,
}

impl Dispatcher {
    /// Sends a turn.
    pub fn send(&self, turn: Box<Turn>, dispatch: Dispatch) {
        self.live.sent.fetch_add(1, Ordering::Relaxed);
        let (server, clock, abort) = (self.server.clone(), self.clock, self.abort.clone());
        let (live, prompts, to_pacer) = (self.live.clone(), self.prompts.clone(), self.to_pacer.clone());
        self.runtime.spawn(async move {
            let (seen, tail) = exchange(&server, &clock, &turn.outgoing, &abort).await;
            live.ended.fetch_add(1, Ordering::Relaxed);
            let _ = to_pacer
                .send(Message::Answered { at_ns: seen.completed_ns.unwrap_or_else(|| clock.now_ns()) });
            prompts.settle(Answer { turn, dispatch, seen });
            drop((to_pacer, prompts));
            tail.finish().await;
        });
    }
}

/// First turns in the order of their session numbers, made some way ahead.
#[derive(Debug)]
pub struct Supply {
    made: BTreeMap<u64, Box<Turn>>,
    next_to_make: u64,
    next_to_take: u64,
    /// Sessions in all; absent: no end.
    limit: Option<u64>,
    ahead: u64,
    /// Last turns of the first sessions; those after have the workload's.
    cut: Vec<u32>,
    num_turns: u32,
}

impl Supply {
    fn new(num_turns: u32, cut: Vec<u32>, limit: Option<u64>, ahead: u64) -> Self {
        Supply { made: BTreeMap::new(), next_to_make: 0, next_to_take: 0, limit, ahead, cut, num_turns }
    }

    /// Asks the prompt threads for what should be there.
    fn order(&mut self, prompts: &Prompts) {
        let upto = self.next_to_take + self.ahead;
        let upto = self.limit.map_or(upto, |limit| upto.min(limit));
        while self.next_to_make < upto {
            let number = self.next_to_make;
            let cut = usize::try_from(number).ok().and_then(|i| self.cut.get(i).copied());
            prompts.make(FirstTurn { number, last_turn: cut.unwrap_or(self.num_turns) });
            self.next_to_make += 1;
        }
    }

    /// Waits until what was ordered is there, so that the first turns go out in time; false: stopped meanwhile.
    pub fn prime(&mut self, prompts: &Prompts, inbox: &Receiver<Message>) -> bool {
        self.order(prompts);
        while (self.made.len() as u64) < self.next_to_make {
            match inbox.recv() {
                Ok(Message::Fresh(turn)) => self.put(turn),
                Ok(Message::Stop) | Err(_) => return false,
                // Nothing has been sent yet that could be answered.
                Ok(_) => {}
            }
        }
        true
    }

    fn put(&mut self, turn: Box<Turn>) {
        self.made.insert(turn.session.number, turn);
    }

    /// The next session's first turn, if it has been made.
    fn take(&mut self, prompts: &Prompts) -> Option<Box<Turn>> {
        let turn = self.made.remove(&self.next_to_take)?;
        self.next_to_take += 1;
        self.order(prompts);
        Some(turn)
    }

    /// Whether a session is left to start.
    fn has_more(&self) -> bool {
        self.limit.is_none_or(|limit| self.next_to_take < limit)
    }
}

/// Waits for a message until an instant; `None`: the instant has come.
fn hear(inbox: &Receiver<Message>, clock: &Clock, until_ns: Option<i64>) -> Option<Message> {
    match until_ns {
        // The pacer holds a sender itself, so the mailbox cannot end.
        None => inbox.recv().ok(),
        Some(ns) => inbox.recv_deadline(clock.instant(ns)).ok(),
    }
}
