//! `run`: a whole benchmark. The daemon's reply is the report, then a line for each record, then an end line with
//! their count and checksum; the file is written while they come.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use proto::report::Report;
use proto::socket::{CallError, Connection};
use proto::wire::{EndLine, ErrorCode, Request};
use serde_json::value::RawValue;

use super::{call, print, print_json};
use crate::args::RunArgs;
use crate::asked::{self, AskedRun};
use crate::exit::{self, Exit, Trouble};
use crate::private::{Daemon, Sim};
use crate::progress::{Show, Watch};
use crate::render::{self, Next, RunView};
use crate::save::{Destination, Saved, Writing};
use crate::secrets::FromArgs;
use crate::signals::{OnFirst, Signals};
use crate::talk::say;

/// What came of a run.
pub(crate) struct Finished {
    /// The report as it came.
    pub(crate) raw: Box<RawValue>,
    /// The report.
    pub(crate) report: Report,
    /// What became of the file; absent when none was asked for.
    pub(crate) saved: Option<SavedAs>,
    /// What is wrong with the records that came, if anything.
    pub(crate) damage: Option<Trouble>,
}

pub(crate) fn act(args: &RunArgs, from_args: &FromArgs, command_line: Vec<String>) -> Result<Exit, Trouble> {
    let AskedRun { mut plan, secrets, sim, notices } = asked::run(args, from_args)?;
    // Before anything starts: a run whose result cannot be kept is not worth its time.
    let destination = Destination::choose(&args.output, &plan.load)?;
    let signals = Signals::install()?;
    if !args.talk.quiet {
        notices.iter().for_each(say);
    }
    let mut sim = sim.map(|options| Sim::start(&options, &signals)).transpose()?;
    if let Some(sim) = &sim {
        plan.target.url.clone_from(&sim.url);
    }
    let mut daemon = Daemon::start(&secrets, &signals)?;
    let request = Request::Run { plan: Box::new(plan), command_line: command_line.clone() };
    let show = Show { progress: !args.talk.quiet, failures: args.output.log_failures };
    let finished = drive(daemon.socket(), &request, show, destination.as_ref(), &signals);
    let sim_ended = sim.as_mut().and_then(Sim::early_end);
    let finished = match finished {
        Ok(finished) => finished,
        Err(error) => return Err(explain(error, &mut daemon, sim_ended, &signals)),
    };
    daemon.end();
    let is_sim_lost = sim_ended.is_some();
    if let Some(trouble) = sim_ended {
        say(&trouble);
    } else if let Some(sim) = sim {
        sim.end();
    }
    let exit = conclude(args, &command_line, &finished, signals.stopped_by())?;
    // The target was ours, and it is not what the run was to measure.
    Ok(if is_sim_lost && exit == Exit::Done { Exit::Internal } else { exit })
}

/// Sends the run and takes in its reply. A signal meanwhile makes the daemon answer early.
pub(crate) fn drive(
    socket: &Path,
    request: &Request,
    show: Show,
    destination: Option<&Destination>,
    signals: &Signals,
) -> Result<Finished, CallError> {
    let watch = Watch::begin(socket, show)?;
    let mut connection = Connection::open(socket)?;
    signals.on_first(OnFirst::StopRun(socket.to_owned()));
    let reply = call::<Report>(&mut connection, request);
    signals.on_first(OnFirst::Finish);
    watch.end();
    let (raw, report) = reply?;
    let (saved, damage) = take_records(&mut connection, &raw, &report, destination, signals)?;
    Ok(Finished { raw, report, saved, damage })
}

/// What became of a file.
#[derive(Debug)]
pub(crate) enum SavedAs {
    /// It is where it was asked for, or beside it.
    Asked(PathBuf),
    /// That place failed; it is in another.
    Elsewhere(PathBuf, Trouble),
    /// It is nowhere.
    Lost(Trouble),
}

impl SavedAs {
    /// Why it is not where it was asked for.
    pub(crate) fn trouble(&self) -> Option<&Trouble> {
        match self {
            SavedAs::Asked(_) => None,
            SavedAs::Elsewhere(_, trouble) | SavedAs::Lost(trouble) => Some(trouble),
        }
    }
}

type Taken = (Option<SavedAs>, Option<Trouble>);

/// Reads the records to their end, into the file if there is to be one. A file that cannot be written does not
/// keep the report from being printed.
fn take_records(
    connection: &mut Connection,
    raw: &RawValue,
    report: &Report,
    destination: Option<&Destination>,
    signals: &Signals,
) -> Result<Taken, CallError> {
    let mut writing = destination.map(|to| Writing::begin(to, raw.get(), signals));
    let mut checksum = crc32fast::Hasher::new();
    let mut records = 0u64;
    let end = loop {
        let line = connection.read_line()?;
        if line.starts_with("{\"end\":") {
            let end = serde_json::from_str::<EndLine>(line)
                .map_err(|error| CallError::Unreadable { error, line: line.to_owned() })?;
            break end.end;
        }
        checksum.update(line.as_bytes());
        records += 1;
        if let Some(Ok(open)) = &mut writing
            && let Err(error) = open.row(line)
        {
            writing = Some(Err(error));
        }
    };
    let crc32 = format!("{:08x}", checksum.finalize());
    let told = report.benchmark.total_requests;
    let damage = (end.records != records || told != records || end.crc32 != crc32).then(|| {
        Trouble::internal(format!(
            "the records did not come as they were sent: {records} with checksum {crc32}, not {} with {} (the \
             report says {told})",
            end.records, end.crc32
        ))
    });
    let path = destination.map(Destination::path).unwrap_or(Path::new("")).display();
    let trouble = |text: String| Trouble::new(Exit::OutputFile, text);
    let saved = writing.map(|writing| match writing.and_then(Writing::finish) {
        Ok(Saved { path: beside, moved: None }) => {
            if destination.is_some_and(|asked| asked.path() != beside) {
                // Whoever reads the file by its name would read another run's.
                say(format_args!("{path} was taken meanwhile; the result is in {}", beside.display()));
            }
            SavedAs::Asked(beside)
        }
        Ok(Saved { path: elsewhere, moved: Some(error) }) => {
            let shown = elsewhere.display();
            let text = format!("the result could not be saved to {path}: {error}; it is in {shown} instead");
            SavedAs::Elsewhere(elsewhere, trouble(text))
        }
        Err(error) => SavedAs::Lost(trouble(format!("the result could not be saved to {path}: {error}"))),
    });
    Ok((saved, damage))
}

/// Why there is no report: a signal before the load, a child that died, or what the daemon says.
fn explain(error: CallError, daemon: &mut Daemon, sim_ended: Option<Trouble>, signals: &Signals) -> Trouble {
    if let (Some(signal), CallError::Refused(failure)) = (signals.stopped_by(), &error)
        && failure.code == ErrorCode::Stopped
    {
        return Trouble::new(Exit::of_signal(signal), failure.message.clone());
    }
    sim_ended.unwrap_or_else(|| daemon.explain(error))
}

/// Prints the report and what there is to say about it.
fn conclude(
    args: &RunArgs,
    command_line: &[String],
    finished: &Finished,
    signal: Option<i32>,
) -> Result<Exit, Trouble> {
    let next = match &finished.saved {
        Some(SavedAs::Asked(path) | SavedAs::Elsewhere(path, _)) => Next::Saved(path.display().to_string()),
        Some(SavedAs::Lost(_)) => Next::NotSaved,
        None => Next::Save(save_command(command_line)),
    };
    if args.talk.json {
        print_json(&finished.raw)?;
        if !args.talk.quiet {
            let _ = render::next(&next, &mut std::io::stderr().lock());
        }
    } else {
        let view = RunView { report: &finished.report, next: &next, is_coloured: is_coloured() };
        print(|mut out| render::run(&view, &mut out))?;
    }
    let not_as_asked = finished.saved.as_ref().and_then(SavedAs::trouble);
    if let Some(trouble) = not_as_asked {
        say(trouble);
    }
    if let Some(damage) = &finished.damage {
        say(damage);
    }
    let exit = Exit::of_run(&finished.report, not_as_asked.is_some(), signal, args.output.strict);
    if exit != Exit::Done
        && let Some(why) = exit::why_failed(&finished.report)
    {
        say(why);
    } else if exit == Exit::Internal {
        say("benchd was stopped from outside: this is the report of a part of the run");
    }
    Ok(if finished.damage.is_some() && exit == Exit::Done { Exit::Internal } else { exit })
}

fn save_command(command_line: &[String]) -> String {
    let words = command_line.iter().map(String::as_str).chain(["--save-result", "results.json"]);
    shlex::try_join(words).unwrap_or_else(|_| "benchctl … --save-result results.json".to_owned())
}

fn is_coloured() -> bool {
    std::io::stdout().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}
