//! A run from its plan to its data: prepares, starts the threads, lets a schedule conduct, and gathers what they
//! leave. The one function that `serve` calls; it owns every thread that it starts and waits for all of them.

use std::sync::Arc;

use crossbeam_channel::unbounded;
use proto::plan::{Load, Plan};
use proto::record::RowContext;
use proto::wire::{ErrorCode, Failure, Secrets, State};
use rustix::process::{Resource, getrlimit};
use tokio_util::sync::CancellationToken;

use crate::engine::clock::Clock;
use crate::engine::live::Live;
use crate::engine::observer::Observer;
use crate::engine::prepare::{Prepared, prepare};
use crate::engine::probe::stopped;
use crate::engine::prompts::Prompts;
use crate::engine::recorder::ErrorLimit;
use crate::engine::run_data::RunData;
use crate::engine::schedule::closed::{self, ClosedPlan};
use crate::engine::schedule::open::{self, OpenPlan};
use crate::engine::schedule::{Dispatcher, Message, Supply};
use crate::engine::telemetry::{Scraper, Telescope};
use crate::engine::watch::Watch;
use crate::engine::{environment, recorder};

/// Files that this process has open for other things than streams, generously.
const OTHER_FILES: u64 = 64;

/// What can be seen of a run from outside while it goes on.
#[derive(Clone, Debug)]
pub struct View {
    /// Live counters.
    pub live: Arc<Live>,
    /// Clock of the load; absent until it begins.
    pub clock: Arc<std::sync::OnceLock<Clock>>,
    /// Model in use; absent until it is known.
    pub model: Arc<std::sync::OnceLock<String>>,
}

impl View {
    /// Of a run that has not begun.
    pub fn new() -> Self {
        View { live: Arc::default(), clock: Arc::default(), model: Arc::default() }
    }
}

impl Default for View {
    fn default() -> Self {
        View::new()
    }
}

/// Runs a plan to its end, or until `stop`; a run that was stopped under load gives what it has.
pub async fn run(
    mut plan: Plan,
    secrets: Secrets,
    command_line: Vec<String>,
    observer: Observer,
    view: View,
    stop: CancellationToken,
) -> Result<RunData, Failure> {
    plan.validate().map_err(|text| Failure::new(ErrorCode::BadValue, text))?;
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let lowered =
        keep_within_files(&mut plan.load, files).map_err(|text| Failure::new(ErrorCode::BadValue, text))?;
    view.live.set_state(State::Preparing);
    let mut prepared = tokio::select! {
        biased;
        () = stop.cancelled() => return Err(stopped()),
        prepared = prepare(&plan, &secrets, &observer, &stop) => prepared?,
    };
    prepared.preparation.notices.extend(lowered);
    for notice in &prepared.preparation.notices {
        observer.notice(notice.clone());
    }
    observer.session_prefix(&prepared.conversation.session_prefix);
    let _ = view.model.set(prepared.config.model.clone());
    let telescope = tokio::select! {
        biased;
        () = stop.cancelled() => return Err(stopped()),
        telescope = Telescope::aim(Scraper::new(&plan.target, &prepared.server)?) => telescope,
    };
    let runtime = tokio::runtime::Handle::current();
    let conducted = tokio::task::spawn_blocking(move || {
        conduct(plan, prepared, telescope, command_line, &observer, &view, runtime, stop)
    });
    conducted
        .await
        .map_err(|e| Failure::new(ErrorCode::Internal, format!("the schedule's thread failed: {e}")))?
}

/// Keeps a load within the files that this process may open, since each stream needs one: lowers the cap of an open
/// loop, and says so; refuses a closed loop of more sessions.
fn keep_within_files(load: &mut Load, files: u64) -> Result<Option<String>, String> {
    let streams = u32::try_from(files.saturating_sub(OTHER_FILES)).unwrap_or(u32::MAX);
    match load {
        Load::Closed { concurrency, .. } if *concurrency > streams => Err(format!(
            "concurrency {concurrency} needs as many connections, and this process may open {files} files, which leaves \
             {streams}; raise the limit (ulimit -n {}) or lower --concurrency",
            u64::from(*concurrency) + OTHER_FILES
        )),
        Load::Open { max_in_flight, .. } if *max_in_flight > streams => {
            let notice = format!(
                "max_in_flight lowered from {max_in_flight} to {streams}: this process may open {files} files; raise the \
                 limit with ulimit -n"
            );
            *max_in_flight = streams.max(1);
            Ok(Some(notice))
        }
        _ => Ok(None),
    }
}

/// Threads that make prompts when nobody said how many.
fn default_workers() -> usize {
    std::thread::available_parallelism().map_or(1, |n| (n.get() / 2).max(1))
}

#[allow(clippy::too_many_arguments)] // the one place where all of a run's parts meet
fn conduct(
    plan: Plan,
    prepared: Prepared,
    telescope: Telescope,
    command_line: Vec<String>,
    observer: &Observer,
    view: &View,
    runtime: tokio::runtime::Handle,
    stop: CancellationToken,
) -> Result<RunData, Failure> {
    let thread_failed =
        |e: std::io::Error| Failure::new(ErrorCode::Internal, format!("a thread cannot be started: {e}"));
    let Prepared { server, conversation, config, preparation, seed, plan_hash } = prepared;
    let (to_pacer, inbox) = unbounded();
    let (records, record_inbox) = unbounded();
    let workers = plan.num_workers.map_or_else(default_workers, |n| n as usize);
    let (prompts, prompt_threads) =
        Prompts::start(workers, &conversation, &to_pacer, &records).map_err(thread_failed)?;

    let stopper = {
        let (stop, to_pacer) = (stop.clone(), to_pacer.clone());
        runtime.spawn(async move {
            stop.cancelled().await;
            let _ = to_pacer.send(Message::Stop);
        })
    };
    let schedule = Schedule::new(&plan, seed);
    let mut supply = schedule.supply();
    let is_primed = supply.prime(&prompts, &inbox);

    // The load's clock starts when everything that it needs is there.
    let clock = Clock::start();
    let recorder = recorder::start(
        record_inbox,
        ErrorLimit::of(&plan),
        stop.clone(),
        clock,
        view.live.clone(),
        observer.clone(),
    )
    .map_err(thread_failed)?;
    let _ = view.clock.set(clock);
    let watch = Watch::start(&runtime, clock, view.live.clone()).map_err(thread_failed)?;
    // Dropped on every way out, so that the task ends.
    let is_over = CancellationToken::new();
    let end_of_load = is_over.clone().drop_guard();
    let telemetry = telescope.follow(&runtime, clock, view.live.clone(), is_over);
    let dispatcher = Dispatcher {
        clock,
        runtime: runtime.clone(),
        server: Arc::new(server),
        prompts,
        records,
        live: view.live.clone(),
        abort: CancellationToken::new(),
        to_pacer,
    };
    let conducted = is_primed.then(|| schedule.conduct(dispatcher, supply, &inbox));
    let ended_ns = clock.now_ns();
    stopper.abort();
    let watched = watch.finish();
    let joined = |_| Failure::new(ErrorCode::Internal, "a thread of the run ended early".to_owned());
    // The mailboxes' senders are gone with the dispatcher and the last exchange, so these threads end.
    for thread in prompt_threads {
        thread.join().map_err(joined)?;
    }
    let recorded = recorder.join().map_err(joined)?;
    let Some(conducted) = conducted else { return Err(stopped()) };
    // Every answer is recorded, so the last scrape counts all of them.
    drop(end_of_load);
    let telemetry = runtime.block_on(telemetry).map_err(|e| {
        Failure::new(ErrorCode::Internal, format!("following the server's metrics failed: {e}"))
    })?;
    let environment = environment::describe(command_line, seed, plan_hash, &clock);
    Ok(RunData {
        row_context: RowContext {
            phases: conducted.phases,
            session_prefix: conversation.session_prefix.clone(),
            origin_epoch_ms: clock.origin_epoch_ms(),
            save_events: plan.save_events,
        },
        config,
        spec: conversation.spec.clone(),
        first_chunk_threshold: conversation.first_chunk_threshold,
        records: recorded.records,
        phases: conducted.phases,
        ended_ns,
        counts: conducted.counts,
        steady_state_reached: conducted.steady_state_reached,
        last_turn_sent_in_warm_up: conducted.last_turn_sent_in_warm_up,
        is_partial: conducted.is_stopped,
        error_limit_reached: recorded.error_limit_reached && conducted.is_stopped,
        watched,
        preparation,
        telemetry,
        environment,
    })
}

/// The load of a plan, with what it needs of the workload.
enum Schedule {
    Closed(ClosedPlan),
    Open(OpenPlan),
}

impl Schedule {
    fn new(plan: &Plan, seed: u64) -> Self {
        let (num_turns, think_time_s) = (plan.workload.num_turns, plan.workload.think_time_s);
        match &plan.load {
            Load::Closed {
                concurrency,
                num_sessions,
                duration_s,
                num_requests,
                ramp_interval_s,
                warmup_jitter_max_s,
                drain_timeout_s,
            } => Schedule::Closed(ClosedPlan {
                concurrency: *concurrency,
                num_sessions: *num_sessions,
                duration_s: *duration_s,
                num_requests: *num_requests,
                ramp_interval_s: ramp_interval_s.unwrap_or(think_time_s / f64::from(*concurrency)),
                warmup_jitter_max_s: *warmup_jitter_max_s,
                drain_timeout_s: *drain_timeout_s,
                num_turns,
                think_time_s,
                seed,
            }),
            Load::Open {
                request_rate_per_s,
                duration_s,
                warm_up_s,
                arrival,
                max_concurrency,
                max_in_flight,
                drain_timeout_s,
            } => Schedule::Open(OpenPlan {
                rate_per_s: *request_rate_per_s,
                duration_s: *duration_s,
                warm_up_s: *warm_up_s,
                arrival: *arrival,
                max_concurrency: *max_concurrency,
                max_in_flight: *max_in_flight,
                drain_timeout_s: *drain_timeout_s,
                num_turns,
                think_time_s,
                seed,
            }),
        }
    }

    fn supply(&self) -> Supply {
        match self {
            Schedule::Closed(plan) => closed::supply(plan),
            Schedule::Open(plan) => open::supply(plan),
        }
    }

    #[allow(clippy::too_many_arguments)] // the one place where all of a run's parts meet
    fn conduct(
        self,
        dispatcher: Dispatcher,
        supply: Supply,
        inbox: &crossbeam_channel::Receiver<Message>,
    ) -> crate::engine::schedule::Conducted {
        match self {
            Schedule::Closed(plan) => closed::conduct(plan, dispatcher, supply, inbox),
            Schedule::Open(plan) => open::conduct(plan, dispatcher, supply, inbox),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_keeps_within_the_files_that_may_be_opened() {
        let load = |text: &str| serde_json::from_str::<Load>(text).unwrap();
        let mut open = load(r#"{"mode":"open","request_rate_per_s":10,"duration_s":10}"#);
        assert_eq!(keep_within_files(&mut open, 20_000), Ok(None));
        let notice = keep_within_files(&mut open, 1024).unwrap().unwrap();
        assert!(notice.contains("lowered from 10000 to 960"), "{notice}");
        assert!(matches!(open, Load::Open { max_in_flight: 960, .. }));

        let mut closed = load(r#"{"mode":"closed","concurrency":961,"num_sessions":1}"#);
        let refusal = keep_within_files(&mut closed, 1024).unwrap_err();
        assert!(refusal.contains("ulimit -n 1025"), "{refusal}");
        assert_eq!(keep_within_files(&mut closed, 1025), Ok(None));
    }
}
