//! A daemon made of a socket and threads, and the tests of what a run does with its replies, its record stream
//! and `stop`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};

use proto::plan::{Load, Plan, Target, Workload};
use proto::report::Report;
use proto::wire::{End, EndLine, ErrorCode, Event, Failure, Request, Status, Stopping};
use serde::Serialize;
use serde_json::json;
use tempfile::TempDir;

use crate::args::OutputArgs;
use crate::commands::run::{Finished, SavedAs, drive};
use crate::exit::{Exit, Trouble};
use crate::progress::Show;
use crate::sample;
use crate::save::Destination;
use crate::signals::Signals;

/// How it answers `run`.
#[derive(Clone)]
enum Answer {
    /// A report and as many records; `damage` changes a byte of the last one after the checksum was taken.
    Report {
        report: Box<Report>,
        records: u64,
        damage: bool,
    },
    /// The same once `stop` came, which is first refused as many times.
    AfterStop {
        report: Box<Report>,
        records: u64,
        refusals: u32,
    },
    Refusal(Failure),
    /// The connection closes.
    Nothing,
}

#[derive(Default)]
struct Progress {
    is_running: bool,
    is_stopped: bool,
    refusals_left: u32,
}

struct FakeDaemon {
    socket: PathBuf,
    progress: Arc<(Mutex<Progress>, Condvar)>,
    folder: TempDir,
}

impl FakeDaemon {
    fn start(answer: Answer) -> FakeDaemon {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("benchd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let progress = Arc::new((Mutex::new(Progress::default()), Condvar::new()));
        let shared = progress.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, shared) = (answer.clone(), shared.clone());
                std::thread::spawn(move || serve(stream.unwrap(), &answer, &shared));
            }
        });
        FakeDaemon { socket, progress, folder }
    }

    fn wait_until_running(&self) {
        let (progress, changed) = &*self.progress;
        drop(changed.wait_while(progress.lock().unwrap(), |p| !p.is_running).unwrap());
    }

    fn run(&self, save: bool, signals: &Signals) -> Result<Finished, Trouble> {
        let args = OutputArgs { save_result: save.then(|| self.saved_path()), ..OutputArgs::default() };
        let destination = Destination::choose(&args, &sample::report().config.load)?;
        let request = Request::Run { plan: Box::new(plan()), command_line: vec![] };
        let show = Show { progress: false, failures: false };
        Ok(drive(&self.socket, &request, show, destination.as_ref(), signals)?)
    }

    fn saved_path(&self) -> PathBuf {
        self.folder.path().join("result.json")
    }
}

fn plan() -> Plan {
    let Load::Closed { .. } = sample::report().config.load else { unreachable!() };
    Plan {
        target: serde_json::from_value::<Target>(json!({ "url": "http://h" })).unwrap(),
        workload: Workload::default(),
        load: sample::report().config.load,
        seed: None,
        num_workers: None,
        max_errors: None,
        max_error_rate: None,
        save_events: false,
    }
}

fn send(stream: &mut UnixStream, value: &impl Serialize) {
    let mut line = serde_json::to_vec(value).unwrap();
    line.push(b'\n');
    // A client that left is not this daemon's trouble.
    let _ = stream.write_all(&line);
}

fn serve(mut stream: UnixStream, answer: &Answer, (progress, changed): &(Mutex<Progress>, Condvar)) {
    for line in BufReader::new(stream.try_clone().unwrap()).lines() {
        match serde_json::from_str(&line.unwrap()).unwrap() {
            Request::Watch {} => {
                send(&mut stream, &Event::State(Status::default()));
                drop(changed.wait_while(progress.lock().unwrap(), |p| !p.is_running).unwrap());
                send(&mut stream, &Event::RunEnded {});
            }
            Request::Run { .. } => {
                if let Answer::AfterStop { refusals, .. } = answer {
                    progress.lock().unwrap().refusals_left = *refusals;
                }
                progress.lock().unwrap().is_running = true;
                changed.notify_all();
                match answer {
                    Answer::Report { report, records, damage } => {
                        stream_report(&mut stream, report, *records, *damage);
                    }
                    Answer::AfterStop { report, records, .. } => {
                        drop(changed.wait_while(progress.lock().unwrap(), |p| !p.is_stopped).unwrap());
                        stream_report(&mut stream, report, *records, false);
                    }
                    Answer::Refusal(failure) => send(&mut stream, &json!({ "err": failure })),
                    Answer::Nothing => return stream.shutdown(std::net::Shutdown::Both).unwrap(),
                }
            }
            Request::Stop {} => {
                let mut progress = progress.lock().unwrap();
                if progress.refusals_left > 0 {
                    progress.refusals_left -= 1;
                    let failure = Failure::new(ErrorCode::NotRunning, "nothing to stop");
                    send(&mut stream, &json!({ "err": failure }));
                } else {
                    progress.is_stopped = true;
                    changed.notify_all();
                    send(&mut stream, &json!({ "ok": Stopping { in_flight: 8 } }));
                }
            }
            other => panic!("not asked by a run: {other:?}"),
        }
    }
}

fn stream_report(stream: &mut UnixStream, report: &Report, records: u64, damage: bool) {
    send(stream, &json!({ "ok": report }));
    let mut checksum = crc32fast::Hasher::new();
    for n in 0..records {
        let mut line = format!("{{\"session_id\":\"s-{n}\",\"turn\":1}}\n").into_bytes();
        checksum.update(&line);
        if damage && n + 1 == records {
            line[16] = b'X';
        }
        let _ = stream.write_all(&line);
    }
    let crc32 = format!("{:08x}", checksum.finalize());
    send(stream, &EndLine { end: End { records, crc32 } });
}

fn report_of(records: u64) -> Box<Report> {
    let mut report = sample::report();
    report.benchmark.total_requests = records;
    Box::new(report)
}

#[test]
fn a_run_is_saved_as_its_report_with_every_record_in_order() {
    let daemon = FakeDaemon::start(Answer::Report { report: report_of(1000), records: 1000, damage: false });
    let finished = daemon.run(true, &Signals::unheard()).unwrap();
    assert!(finished.damage.is_none());
    assert!(matches!(finished.saved, Some(SavedAs::Asked(path)) if path == daemon.saved_path()));
    let saved: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(daemon.saved_path()).unwrap()).unwrap();
    let mut want: serde_json::Value = serde_json::from_str(finished.raw.get()).unwrap();
    let rows: Vec<_> = (0..1000).map(|n| json!({ "session_id": format!("s-{n}"), "turn": 1 })).collect();
    want["raw_metrics"] = rows.into();
    assert_eq!(saved, want);
}

#[test]
fn a_record_that_changed_on_the_way_is_noticed() {
    let daemon = FakeDaemon::start(Answer::Report { report: report_of(3), records: 3, damage: true });
    let damage = daemon.run(false, &Signals::unheard()).unwrap().damage.unwrap();
    assert_eq!(damage.exit, Exit::Internal);
    assert!(damage.message.contains("checksum"), "{damage}");
}

#[test]
fn a_record_that_is_missing_is_noticed() {
    let daemon = FakeDaemon::start(Answer::Report { report: report_of(4), records: 3, damage: false });
    let damage = daemon.run(false, &Signals::unheard()).unwrap().damage.unwrap();
    assert!(damage.message.contains("the report says 4"), "{damage}");
}

#[test]
fn a_signal_stops_the_run_and_its_partial_report_is_saved() {
    for refusals in [0, 3] {
        let mut report = report_of(5);
        report.benchmark.is_partial = true;
        let daemon = FakeDaemon::start(Answer::AfterStop { report, records: 5, refusals });
        let signals = Signals::unheard();
        let finished = std::thread::scope(|scope| {
            let run = scope.spawn(|| daemon.run(true, &signals));
            daemon.wait_until_running();
            signals.on_signal(signal_hook::consts::SIGTERM);
            run.join().unwrap().unwrap()
        });
        assert!(finished.report.benchmark.is_partial);
        assert!(daemon.saved_path().exists());
        assert_eq!(signals.stopped_by(), Some(signal_hook::consts::SIGTERM));
        assert_eq!(Exit::of_run(&finished.report, false, signals.stopped_by(), None).code(), 143);
    }
}

#[test]
fn a_refusal_ends_with_its_code_and_saves_nothing() {
    for (code, exit) in [(ErrorCode::Unreachable, 6), (ErrorCode::Infeasible, 2), (ErrorCode::Busy, 11)] {
        let daemon = FakeDaemon::start(Answer::Refusal(Failure::new(code, "no")));
        let Err(trouble) = daemon.run(true, &Signals::unheard()) else { panic!("it ran") };
        assert_eq!((trouble.exit.code(), trouble.message.as_str()), (exit, "no"));
        assert!(!daemon.saved_path().exists());
    }
}

#[test]
fn a_daemon_that_hangs_up_is_an_internal_error() {
    let daemon = FakeDaemon::start(Answer::Nothing);
    let Err(trouble) = daemon.run(false, &Signals::unheard()) else { panic!("it ran") };
    assert_eq!(trouble.exit, Exit::Internal);
}
