//! What is seen on stderr while a run goes on: a bar on a terminal, a plain line now and then elsewhere, notices
//! and failures as they come. Fed by a connection of its own that watches.

use std::io::IsTerminal;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use proto::socket::{CallError, Connection};
use proto::wire::{Event, Request, State, Status};

use crate::talk::{line, say};

/// Time between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Time that the last events have to come after the run's reply.
const LAST_EVENTS_WITHIN: Duration = Duration::from_secs(1);

/// What is to be shown.
#[derive(Clone, Copy, Debug)]
pub struct Show {
    /// Progress and notices.
    pub progress: bool,
    /// Each failure.
    pub failures: bool,
}

/// A connection that watches, and the thread that shows what it says.
#[derive(Debug)]
pub struct Watch {
    stream: UnixStream,
    ended: Receiver<()>,
    thread: JoinHandle<()>,
}

impl Watch {
    /// Begins to watch; no event that comes after this is missed.
    pub fn begin(socket: &Path, show: Show) -> Result<Watch, CallError> {
        let mut connection = Connection::open(socket)?;
        connection.send(&Request::Watch {})?;
        let first: Event = connection.read()?;
        let stream = connection.stream().try_clone()?;
        let (sender, ended) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut screen = Screen::new(show);
            screen.show(&first);
            loop {
                match connection.read::<Event>() {
                    Ok(event) => {
                        screen.show(&event);
                        if matches!(event, Event::RunEnded {} | Event::Dropped { .. }) {
                            break;
                        }
                    }
                    // An event that this version does not know; the next one may be known.
                    Err(CallError::Unreadable { .. }) => {}
                    Err(_) => break,
                }
            }
            screen.clear();
            let _ = sender.send(());
        });
        Ok(Watch { stream, ended, thread })
    }

    /// Lets the last events come, then stops showing.
    pub fn end(self) {
        let _ = self.ended.recv_timeout(LAST_EVENTS_WITHIN);
        let _ = self.stream.shutdown(Shutdown::Both);
        let _ = self.thread.join();
    }
}

/// The place where events become text.
struct Screen {
    show: Show,
    bar: Option<ProgressBar>,
    last_line: Instant,
}

impl Screen {
    fn new(show: Show) -> Screen {
        let bar = (show.progress && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new_spinner().with_style(style(false));
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Screen { show, bar, last_line: Instant::now() }
    }

    fn show(&mut self, event: &Event) {
        match event {
            Event::State(status) | Event::Progress(status) => self.status(status),
            Event::Notice { text } if self.show.progress => self.above_the_bar(|| say(text)),
            Event::Failure { .. } if self.show.failures => {
                let text = failure(event).unwrap_or_default();
                self.above_the_bar(|| line(&text));
            }
            Event::Dropped { reason } => self.above_the_bar(|| {
                say(format_args!("progress is no longer shown, and the run goes on: {reason}"))
            }),
            Event::Notice { .. } | Event::Failure { .. } | Event::RunEnded {} => {}
        }
    }

    fn status(&mut self, status: &Status) {
        if let Some(bar) = &self.bar {
            if let Some(planned) = status.planned
                && bar.length() != Some(planned)
            {
                bar.set_length(planned);
                bar.set_style(style(true));
                // From here on it is drawn when there is news: the machine is busy measuring.
                bar.disable_steady_tick();
            }
            bar.set_position(status.sent + status.refused);
            bar.set_message(status_text(status));
        } else if self.show.progress && self.last_line.elapsed() >= LINE_EVERY {
            self.last_line = Instant::now();
            line(status_text(status));
        }
    }

    fn above_the_bar(&self, print: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn style(has_length: bool) -> ProgressStyle {
    let template = if has_length { "{bar:16} {wide_msg}" } else { "{spinner} {wide_msg}" };
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
}

/// The state in one line.
fn status_text(status: &Status) -> String {
    let state = match status.state {
        State::Idle => "idle",
        State::Preparing => return "preparing: server, tokenizer, chat template".to_owned(),
        State::WarmUp => "warm-up",
        State::Measuring => "measuring",
        State::Draining => "draining",
        State::Smoking => "one request",
    };
    let mut parts = vec![match status.planned {
        Some(planned) => format!("{state}: sent {}/{planned}", status.sent),
        None => format!("{state}: sent {}", status.sent),
    }];
    parts.push(format!("done {}", status.completed));
    parts.push(format!("failed {}", status.failed));
    if status.refused > 0 {
        parts.push(format!("refused {}", status.refused));
    }
    parts.push(format!("in flight {}", status.in_flight));
    if let Some(rate) = status.achieved_rate_per_s {
        parts.push(match status.asked_rate_per_s {
            Some(asked) => format!("{rate:.1}/s of {asked}"),
            None => format!("{rate:.1}/s"),
        });
    }
    if let Some(lag) = status.dispatch_lag_p99_ms {
        parts.push(format!("lag p99 {lag:.2} ms"));
    }
    if let Some(eta) = status.eta_s {
        parts.push(format!("{:.0} s left", eta.max(0.0)));
    }
    parts.join(", ")
}

/// A failure in one line; nothing for other events.
fn failure(event: &Event) -> Option<String> {
    let Event::Failure { session_id, turn, outcome, http_status, error } = event else { return None };
    let mut text = format!("failed: {outcome}");
    if let Some(code) = http_status {
        text += &format!(" {code}");
    }
    if let Some(id) = session_id {
        text += &format!(", session {id}");
    }
    if let Some(turn) = turn {
        text += &format!(", turn {turn}");
    }
    if let Some(error) = error {
        text += &format!(": {error}");
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_one_line_and_leaves_out_what_is_not_known() {
        let mut status = Status {
            state: State::Measuring,
            planned: Some(384),
            sent: 120,
            completed: 112,
            in_flight: 8,
            dispatch_lag_p99_ms: Some(0.0712),
            eta_s: Some(6.4),
            ..Status::default()
        };
        assert_eq!(
            status_text(&status),
            "measuring: sent 120/384, done 112, failed 0, in flight 8, lag p99 0.07 ms, 6 s left"
        );
        status = Status {
            state: State::WarmUp,
            sent: 5,
            refused: 2,
            achieved_rate_per_s: Some(9.96),
            asked_rate_per_s: Some(10.0),
            ..Status::default()
        };
        assert_eq!(
            status_text(&status),
            "warm-up: sent 5, done 0, failed 0, refused 2, in flight 0, 10.0/s of 10"
        );
    }

    #[test]
    fn a_failure_is_one_line() {
        let event = Event::Failure {
            session_id: Some("ab-3".into()),
            turn: Some(2),
            outcome: "http_status".into(),
            http_status: Some(500),
            error: Some("the engine died".into()),
        };
        assert_eq!(
            failure(&event).unwrap(),
            "failed: http_status 500, session ab-3, turn 2: the engine died"
        );
    }
}
