//! SIGINT, SIGTERM and SIGHUP. One thread owns their meaning: during a run the first asks the daemon for the
//! partial report, a second one (and any outside a run) ends our children and us at once.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::socket::{CallError, Connection};
use proto::wire::{ErrorCode, Request, Stopping};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals as Incoming;

use crate::exit::{Exit, Trouble};
use crate::talk::say;

/// How often `stop` is tried while the daemon has not taken up the run yet, 20 ms apart.
const STOP_TRIES: u32 = 250;

/// What the next signal means, and what must not be left behind.
#[derive(Clone, Debug)]
pub struct Signals {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug)]
struct Shared {
    first: OnFirst,
    /// The signal that stopped the run.
    stopped_by: Option<i32>,
    was_asked: bool,
    children: Vec<u32>,
    litter: Vec<PathBuf>,
}

/// What the first signal does.
#[derive(Clone, Debug)]
pub enum OnFirst {
    /// End at once.
    Leave,
    /// Ask the daemon at this socket to stop the run.
    StopRun(PathBuf),
    /// The run is over: let what is being printed and saved come to its end.
    Finish,
}

impl Signals {
    /// Takes the signals over.
    pub fn install() -> Result<Signals, Trouble> {
        // A file that may not grow any more is an error of its write, and not the end of us.
        signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default())
            .map_err(|e| Trouble::internal(format!("signals: {e}")))?;
        let mut watched = vec![SIGINT, SIGTERM];
        if !is_ignored(SIGHUP) {
            watched.push(SIGHUP);
        }
        let mut incoming = Incoming::new(watched)
            .map_err(|e| Trouble::internal(format!("the signal handlers could not be set: {e}")))?;
        let signals = Signals::unheard();
        let heard = signals.clone();
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for signal in incoming.forever() {
                    heard.on_signal(signal);
                }
            })
            .map_err(|e| Trouble::internal(format!("no thread for signals: {e}")))?;
        Ok(signals)
    }

    /// Without handlers, for tests.
    pub(crate) fn unheard() -> Signals {
        let shared = Shared {
            first: OnFirst::Leave,
            stopped_by: None,
            was_asked: false,
            children: Vec::new(),
            litter: Vec::new(),
        };
        Signals { shared: Arc::new(Mutex::new(shared)) }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what the first signal does from here on.
    pub fn on_first(&self, first: OnFirst) {
        self.lock().first = first;
    }

    /// A child that must not outlive us.
    pub fn add_child(&self, pid: u32) {
        self.lock().children.push(pid);
    }

    /// A child that has been waited for; its pid may belong to someone else now.
    pub fn forget_child(&self, pid: u32) {
        self.lock().children.retain(|child| *child != pid);
    }

    /// A file or folder to remove when we end at once.
    pub fn add_litter(&self, path: &Path) {
        self.lock().litter.push(path.to_owned());
    }

    /// A file that became something to keep, or is gone.
    pub fn forget_litter(&self, path: &Path) {
        self.lock().litter.retain(|known| known != path);
    }

    /// The signal that stopped the run.
    pub fn stopped_by(&self) -> Option<i32> {
        self.lock().stopped_by
    }

    pub(crate) fn on_signal(&self, signal: i32) {
        let mut shared = self.lock();
        if shared.was_asked {
            leave(&shared, signal);
        }
        shared.was_asked = true;
        match shared.first.clone() {
            OnFirst::Leave => leave(&shared, signal),
            OnFirst::StopRun(socket) => {
                shared.stopped_by = Some(signal);
                say("stopping; the report of what was measured follows (once more: leave at once)");
                let signals = self.clone();
                // Not on this thread: it must hear the second signal.
                std::thread::spawn(move || signals.stop_run(&socket));
            }
            OnFirst::Finish => say("the run is over and its report is on the way (once more: leave at once)"),
        }
    }

    fn stop_run(&self, socket: &Path) {
        for _ in 0..STOP_TRIES {
            if !matches!(self.lock().first, OnFirst::StopRun(_)) {
                return;
            }
            let answer = Connection::open(socket)
                .map_err(CallError::from)
                .and_then(|mut connection| connection.call::<Stopping>(&Request::Stop {}));
            match answer {
                Ok(_) => return,
                // The signal came between our request and its arrival.
                Err(CallError::Refused(failure)) if failure.code == ErrorCode::NotRunning => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => {
                    say(format_args!("the run could not be stopped: {error}"));
                    return;
                }
            }
        }
    }
}

/// Ends children and process. Keeping the lock keeps pids from being forgotten, and so reused, meanwhile.
fn leave(shared: &Shared, signal: i32) -> ! {
    for pid in &shared.children {
        if let Some(pid) = i32::try_from(*pid).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
    for path in &shared.litter {
        let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    }
    std::process::exit(i32::from(Exit::of_signal(signal).code()))
}

/// Whether our parent had the signal ignored, as nohup does. Known only where there is /proc.
fn is_ignored(signal: i32) -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return false };
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
