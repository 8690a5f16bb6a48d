//! The control actor: alone owns what the daemon is doing. Connections ask it by message; it starts and stops runs on
//! the engine's runtime and tells watchers what happens. It never waits for a client or for the load.

use std::time::{Duration, Instant};

use proto::plan::{Plan, Target};
use proto::record::{Outcome, Record, RowContext, session_id};
use proto::report::{Report, SmokeReport};
use proto::wire::{ErrorCode, Event, Failure, Hello, PROTOCOL_VERSION, Secrets, State, Status, Stopping};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::engine::observer::{Observer, Said};
use crate::engine::run::{View, run};
use crate::engine::smoke::smoke;
use crate::engine::summary::summarize;

/// Questions that may wait for the actor; asking waits when it is full.
const QUESTIONS: usize = 256;
/// Events that may wait for a watcher; a reader this far behind is disconnected.
const EVENT_QUEUE: usize = 64;
/// Time between progress events.
const PROGRESS: Duration = Duration::from_secs(1);

/// A finished run.
#[derive(Debug)]
pub struct Finished {
    /// Its report.
    pub report: Box<Report>,
    /// Its records.
    pub records: Vec<Record>,
    /// What makes rows of them.
    pub context: RowContext,
}

type Answer<T> = oneshot::Sender<Result<T, Failure>>;

/// What the actor is asked or told.
enum Question {
    Hello(oneshot::Sender<Hello>),
    Status(oneshot::Sender<Status>),
    Run {
        plan: Box<Plan>,
        command_line: Vec<String>,
        answer: Answer<Finished>,
    },
    Smoke {
        target: Box<Target>,
        answer: Answer<SmokeReport>,
    },
    Watch(oneshot::Sender<mpsc::Receiver<Event>>),
    Stop(Answer<Stopping>),
    Quit(oneshot::Sender<Stopping>),
    /// What was going on has ended.
    Ended,
    /// The engine said something.
    Said(Said),
}

/// The way to the actor; cheap to clone.
#[derive(Clone, Debug)]
pub struct Control {
    to: mpsc::Sender<Question>,
}

impl Control {
    /// Starts the actor. It ends when `quit` is cancelled and nothing is going on any more.
    pub fn start(
        secrets: Secrets,
        engine: tokio::runtime::Handle,
        quit: CancellationToken,
    ) -> (Self, JoinHandle<()>) {
        let (to, from) = mpsc::channel(QUESTIONS);
        let actor = Actor {
            secrets,
            engine,
            quit,
            to_self: to.clone(),
            started: Instant::now(),
            doing: Doing::Nothing,
            watchers: Vec::new(),
        };
        (Control { to }, tokio::spawn(actor.run(from)))
    }

    async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Result<T, Failure> {
        let gone = |_| Failure::new(ErrorCode::Stopped, "benchd is going down");
        let (answer, answered) = oneshot::channel();
        self.to.send(question(answer)).await.map_err(|_| gone(()))?;
        answered.await.map_err(|_| gone(()))
    }

    /// Who is there.
    pub async fn hello(&self) -> Result<Hello, Failure> {
        self.ask(Question::Hello).await
    }

    /// What is going on.
    pub async fn status(&self) -> Result<Status, Failure> {
        self.ask(Question::Status).await
    }

    /// Runs a plan to its end.
    pub async fn run(&self, plan: Box<Plan>, command_line: Vec<String>) -> Result<Finished, Failure> {
        self.ask(|answer| Question::Run { plan, command_line, answer }).await?
    }

    /// Makes a smoke test.
    pub async fn smoke(&self, target: Box<Target>) -> Result<SmokeReport, Failure> {
        self.ask(|answer| Question::Smoke { target, answer }).await?
    }

    /// Events from now on, the state first. The channel ends when this watcher fell behind or the daemon goes down.
    pub async fn watch(&self) -> Result<mpsc::Receiver<Event>, Failure> {
        self.ask(Question::Watch).await
    }

    /// Ends the run that is going on.
    pub async fn stop(&self) -> Result<Stopping, Failure> {
        self.ask(Question::Stop).await?
    }

    /// Ends the daemon.
    pub async fn quit(&self) -> Result<Stopping, Failure> {
        self.ask(Question::Quit).await
    }
}

/// What is going on; one thing at a time.
enum Doing {
    Nothing,
    Running(Box<Running>),
    Smoking { stop: CancellationToken },
}

/// A run that is going on.
struct Running {
    plan: Box<Plan>,
    view: View,
    stop: CancellationToken,
    /// For the session ids of failures.
    session_prefix: Option<String>,
}

struct Actor {
    secrets: Secrets,
    engine: tokio::runtime::Handle,
    quit: CancellationToken,
    to_self: mpsc::Sender<Question>,
    started: Instant,
    doing: Doing,
    watchers: Vec<mpsc::Sender<Event>>,
}

impl Actor {
    async fn run(mut self, mut from: mpsc::Receiver<Question>) {
        let mut progress = tokio::time::interval(PROGRESS);
        progress.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let quit = self.quit.clone();
        let mut is_quitting = false;
        loop {
            tokio::select! {
                biased;
                () = quit.cancelled(), if !is_quitting => {
                    is_quitting = true;
                    self.stop_all();
                }
                question = from.recv() => match question {
                    Some(question) => self.answer(question),
                    None => return,
                },
                _ = progress.tick() => {
                    if !matches!(self.doing, Doing::Nothing) && !self.watchers.is_empty() {
                        let status = self.status();
                        self.tell(&Event::Progress(status));
                    }
                }
            }
            if is_quitting && matches!(self.doing, Doing::Nothing) {
                return;
            }
        }
    }

    fn answer(&mut self, question: Question) {
        // Whoever asked may be gone; the answer then goes nowhere.
        match question {
            Question::Hello(answer) => {
                let _ = answer.send(Hello {
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    protocol: PROTOCOL_VERSION,
                    pid: std::process::id(),
                    uptime_s: self.started.elapsed().as_secs_f64(),
                });
            }
            Question::Status(answer) => {
                let _ = answer.send(self.status());
            }
            Question::Run { plan, command_line, answer } => self.start_run(plan, command_line, answer),
            Question::Smoke { target, answer } => self.start_smoke(target, answer),
            Question::Watch(answer) => {
                let (to, events) = mpsc::channel(EVENT_QUEUE);
                let _ = to.try_send(Event::State(self.status()));
                self.watchers.push(to);
                let _ = answer.send(events);
            }
            Question::Stop(answer) => {
                let _ = answer.send(if matches!(self.doing, Doing::Nothing) {
                    Err(Failure::new(ErrorCode::NotRunning, "nothing is running that could be stopped"))
                } else {
                    Ok(self.stop_all())
                });
            }
            Question::Quit(answer) => {
                let _ = answer.send(self.stop_all());
                self.quit.cancel();
            }
            Question::Ended => {
                self.doing = Doing::Nothing;
                self.tell(&Event::RunEnded {});
            }
            Question::Said(said) => self.said(said),
        }
    }

    fn said(&mut self, said: Said) {
        let event = match said {
            Said::Notice(text) => Event::Notice { text },
            Said::Failure(record) => {
                let prefix = match &self.doing {
                    Doing::Running(running) => running.session_prefix.clone(),
                    _ => None,
                };
                Event::Failure {
                    session_id: record.session.map(|n| session_id(prefix.as_deref().unwrap_or_default(), n)),
                    turn: record.turn,
                    outcome: record.outcome.name().to_owned(),
                    http_status: match record.outcome {
                        Outcome::HttpStatus(status) => Some(status),
                        _ => None,
                    },
                    error: record.error.as_deref().map(str::to_owned),
                }
            }
            Said::SessionPrefix(prefix) => {
                if let Doing::Running(running) = &mut self.doing {
                    running.session_prefix = Some(prefix);
                }
                return;
            }
        };
        self.tell(&event);
    }

    /// Ends what is going on; whoever asked for it gets what there is.
    fn stop_all(&mut self) -> Stopping {
        match &self.doing {
            Doing::Nothing => Stopping { in_flight: 0 },
            Doing::Running(running) => {
                running.stop.cancel();
                Stopping { in_flight: running.view.live.in_flight() }
            }
            Doing::Smoking { stop } => {
                stop.cancel();
                Stopping { in_flight: 1 }
            }
        }
    }

    fn status(&self) -> Status {
        match &self.doing {
            Doing::Nothing => Status::default(),
            Doing::Smoking { .. } => Status { state: State::Smoking, ..Status::default() },
            Doing::Running(running) => running.status(),
        }
    }

    /// Tells all watchers; one that has fallen behind is let go.
    fn tell(&mut self, event: &Event) {
        self.watchers.retain(|to| to.try_send(event.clone()).is_ok());
    }

    fn start_run(&mut self, plan: Box<Plan>, command_line: Vec<String>, answer: Answer<Finished>) {
        if let Some(refusal) = self.busy() {
            let _ = answer.send(Err(refusal));
            return;
        }
        let (observer, said) = Observer::new();
        let (view, stop) = (View::new(), CancellationToken::new());
        self.doing = Doing::Running(Box::new(Running {
            plan: plan.clone(),
            view: view.clone(),
            stop: stop.clone(),
            session_prefix: None,
        }));
        let to_self = self.to_self.clone();
        tokio::spawn(pass_on(said, to_self.clone()));
        let work = run(*plan, self.secrets.clone(), command_line, observer, view, stop);
        let work = self.engine.spawn(async move {
            let data = work.await?;
            let summary = tokio::task::spawn_blocking(move || {
                let report = Box::new(summarize(&data));
                Finished { report, records: data.records, context: data.row_context }
            });
            summary.await.map_err(|e| Failure::new(ErrorCode::Internal, format!("the summary failed: {e}")))
        });
        tokio::spawn(async move {
            let result = work.await.unwrap_or_else(|e| {
                Err(Failure::new(ErrorCode::Internal, format!("the run failed inside benchd: {e}")))
            });
            let _ = answer.send(result);
            let _ = to_self.send(Question::Ended).await;
        });
    }

    fn start_smoke(&mut self, target: Box<Target>, answer: Answer<SmokeReport>) {
        if let Some(refusal) = self.busy() {
            let _ = answer.send(Err(refusal));
            return;
        }
        if let Err(text) = target.validate() {
            let _ = answer.send(Err(Failure::new(ErrorCode::BadValue, text)));
            return;
        }
        let stop = CancellationToken::new();
        self.doing = Doing::Smoking { stop: stop.clone() };
        let (secrets, to_self) = (self.secrets.clone(), self.to_self.clone());
        let work = self.engine.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => Err(crate::engine::probe::stopped()),
                report = smoke(&target, &secrets, &stop) => report,
            }
        });
        tokio::spawn(async move {
            let result = work.await.unwrap_or_else(|e| {
                Err(Failure::new(ErrorCode::Internal, format!("the smoke test failed: {e}")))
            });
            let _ = answer.send(result);
            let _ = to_self.send(Question::Ended).await;
        });
    }

    fn busy(&self) -> Option<Failure> {
        let what = match &self.doing {
            Doing::Nothing if self.quit.is_cancelled() => {
                return Some(Failure::new(ErrorCode::Stopped, "benchd is going down"));
            }
            Doing::Nothing => return None,
            Doing::Running(_) => "a run",
            Doing::Smoking { .. } => "a smoke test",
        };
        Some(Failure::new(
            ErrorCode::Busy,
            format!("{what} is going on; wait for its end, or end it with stop"),
        ))
    }
}

impl Running {
    fn status(&self) -> Status {
        use proto::plan::Load;
        let live = &self.view.live;
        let mut status = match self.view.clock.get() {
            Some(clock) => live.status(clock),
            None => Status { state: live.state(), ..Status::default() },
        };
        status.target = Some(self.plan.target.url.clone());
        status.model = self.view.model.get().cloned();
        let elapsed_s = status.elapsed_s;
        match &self.plan.load {
            Load::Open { request_rate_per_s, duration_s, .. } => {
                status.asked_rate_per_s = Some(*request_rate_per_s);
                // Bounded by validation.
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                let slots = (request_rate_per_s * duration_s).ceil() as u64;
                status.planned = Some(slots);
                status.eta_s = (elapsed_s > 0.0).then(|| (duration_s - elapsed_s).max(0.0));
            }
            Load::Closed { concurrency, num_sessions, duration_s, num_requests, .. } => {
                let turns = u64::from(self.plan.workload.num_turns);
                // The first generation has half of the turns on average.
                let first = u64::from(*concurrency) * (turns + 1) / 2;
                let by_sessions = num_sessions.map(|n| n.saturating_mul(turns));
                let whole = by_sessions.into_iter().chain(*num_requests).min();
                status.planned = whole.map(|n| n.saturating_add(first));
                let by_count = status.planned.filter(|_| status.completed > 0).map(|planned| {
                    let left = planned.saturating_sub(status.completed) as f64;
                    elapsed_s * left / status.completed as f64
                });
                let by_clock = duration_s.map(|d| (d - elapsed_s).max(0.0));
                status.eta_s = by_count.into_iter().chain(by_clock).reduce(f64::min);
            }
        }
        status
    }
}

/// Passes what the engine says on to the actor; ends with the engine's run.
async fn pass_on(mut said: mpsc::Receiver<Said>, to: mpsc::Sender<Question>) {
    while let Some(said) = said.recv().await {
        if to.send(Question::Said(said)).await.is_err() {
            return;
        }
    }
}
