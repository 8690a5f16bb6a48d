//! The prompt threads: they make first turns ahead of need, and turn answers into records and next turns, so that
//! no thread that reads the network ever tokenises or writes a prompt. They own no state between two jobs.

use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, TryRecvError, select, unbounded};
use proto::record::Record;

use crate::engine::exchange::Observed;
use crate::engine::schedule::Message;
use crate::engine::session::{Dispatch, Next, SharedConversation, Turn};

/// An answer to be settled: made by an exchange, ahead of everything else because a session waits for it.
#[derive(Debug)]
pub struct Answer {
    /// The turn that was sent.
    pub turn: Box<Turn>,
    /// When it was due.
    pub dispatch: Dispatch,
    /// What came of it.
    pub seen: Observed,
}

/// A first turn to be made.
#[derive(Clone, Copy, Debug)]
pub struct FirstTurn {
    /// Session number.
    pub number: u64,
    /// Its last turn.
    pub last_turn: u32,
}

/// The threads' mailboxes. When all of its clones are gone, the threads end.
#[derive(Clone, Debug)]
pub struct Prompts {
    answers: Sender<Answer>,
    firsts: Sender<FirstTurn>,
}

impl Prompts {
    /// Starts `threads` threads that give records to `records` and turns to `schedule`.
    pub fn start(
        threads: usize,
        conversation: &SharedConversation,
        schedule: &Sender<Message>,
        records: &Sender<Record>,
    ) -> std::io::Result<(Self, Vec<JoinHandle<()>>)> {
        let (answers, answer_jobs) = unbounded();
        let (firsts, first_jobs) = unbounded();
        let handles = (0..threads)
            .map(|i| {
                let worker = Worker {
                    conversation: conversation.clone(),
                    answers: answer_jobs.clone(),
                    firsts: first_jobs.clone(),
                    schedule: schedule.clone(),
                    records: records.clone(),
                };
                thread::Builder::new().name(format!("prompts-{i}")).spawn(move || worker.run())
            })
            .collect::<Result<_, _>>()?;
        Ok((Prompts { answers, firsts }, handles))
    }

    /// Hands over an answer.
    pub fn settle(&self, answer: Answer) {
        // The threads outlive every sender.
        let _ = self.answers.send(answer);
    }

    /// Asks for a first turn.
    pub fn make(&self, first: FirstTurn) {
        let _ = self.firsts.send(first);
    }
}

struct Worker {
    conversation: SharedConversation,
    answers: Receiver<Answer>,
    firsts: Receiver<FirstTurn>,
    schedule: Sender<Message>,
    records: Sender<Record>,
}

impl Worker {
    fn run(self) {
        loop {
            match self.answers.try_recv() {
                Ok(answer) => {
                    self.settle(answer);
                    continue;
                }
                // Both mailboxes end together; nothing can be left in the other that anyone waits for.
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {}
            }
            select! {
                recv(self.answers) -> answer => match answer {
                    Ok(answer) => self.settle(answer),
                    Err(_) => return,
                },
                recv(self.firsts) -> first => match first {
                    Ok(first) => {
                        let turn = Turn::first(&self.conversation, first.number, first.last_turn);
                        let _ = self.schedule.send(Message::Fresh(turn));
                    }
                    Err(_) => return,
                },
            }
        }
    }

    fn settle(&self, answer: Answer) {
        let (number, turn) = (answer.turn.session.number, answer.turn.session.turn);
        let at_ns = answer.seen.completed_ns;
        let (record, next) = answer.turn.answered(&self.conversation, answer.dispatch, answer.seen);
        let _ = self.records.send(record);
        let message = match next {
            Next::Continues(turn) => Message::Ready { turn, completed_ns: at_ns.unwrap_or(i64::MAX) },
            Next::Completed => Message::Over { number, turn, broken: false, at_ns },
            Next::Broken => Message::Over { number, turn, broken: true, at_ns },
        };
        let _ = self.schedule.send(message);
    }
}
