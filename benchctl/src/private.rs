//! The private benchd of direct mode, and the simulator of `--sim`: started for one command, ended with it.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use proto::socket::{CallError, Connection};
use proto::wire::{Request, Secrets, Stopping};
use serde::Deserialize;
use tempfile::TempDir;

use crate::child::Lifelined;
use crate::exit::Trouble;
use crate::siblings::Sibling;
use crate::signals::Signals;

/// Time until benchd listens.
const BENCHD_READY_WITHIN: Duration = Duration::from_secs(15);
/// Time until benchsim listens; it may have a large tokenizer to read.
const BENCHSIM_READY_WITHIN: Duration = Duration::from_secs(60);

/// Time that a dying benchd may take from closing its sockets to its end.
const BETWEEN_SOCKET_AND_PROCESS: Duration = Duration::from_millis(100);
/// Longest folder, in bytes, in which there is room for ours: a socket's path ends at 104 bytes (108 on Linux).
const LONGEST_BASE: usize = 70;

/// A benchd of our own.
#[derive(Debug)]
pub struct Daemon {
    process: Lifelined,
    socket: PathBuf,
    // After the process: it must have let go of the socket before its folder goes.
    folder: TempDir,
    signals: Signals,
}

impl Daemon {
    /// Starts it on a socket in a folder of its own, and hands it the secrets.
    pub fn start(secrets: &Secrets, signals: &Signals) -> Result<Daemon, Trouble> {
        let folder = fresh_folder()?;
        signals.add_litter(folder.path());
        let socket = folder.path().join("benchd.sock");
        let args = ["--private".to_owned(), "--socket".to_owned(), socket.to_string_lossy().into_owned()];
        let first_line = serde_json::to_string(secrets)
            .map_err(|e| Trouble::internal(format!("the secrets could not be written: {e}")))?;
        let started = Lifelined::start(
            Sibling::Benchd,
            &args,
            Some(&first_line),
            Stdio::inherit(),
            BENCHD_READY_WITHIN,
            signals,
        );
        let (process, _) = started.inspect_err(|_| signals.forget_litter(folder.path()))?;
        Ok(Daemon { process, socket, folder, signals: signals.clone() })
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// A connection to it.
    pub fn connect(&self) -> Result<Connection, Trouble> {
        Connection::open(&self.socket).map_err(|e| {
            Trouble::internal(format!("no connection to benchd at {}: {e}", self.socket.display()))
        })
    }

    /// What a call that got no value comes to: where the connection broke because benchd ended, that is why.
    pub fn explain(&mut self, error: CallError) -> Trouble {
        if let CallError::Io(_) = &error {
            // The socket may be gone a moment before its process.
            std::thread::sleep(BETWEEN_SOCKET_AND_PROCESS);
            if let Some(ended) = self.process.early_end("before its answer, and the run's records with it") {
                return ended;
            }
        }
        error.into()
    }

    /// Asks it to end, and waits.
    pub fn end(mut self) {
        if let Ok(mut connection) = self.connect() {
            let _ = connection.call::<Stopping>(&Request::Quit {});
        }
        self.process.end();
        self.signals.forget_litter(self.folder.path());
    }
}

fn fresh_folder() -> Result<TempDir, Trouble> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|dir| dir.is_dir() && dir.as_os_str().len() <= LONGEST_BASE);
    let make = |base: &Path| {
        tempfile::Builder::new()
            .prefix("benchctl-")
            .permissions(std::fs::Permissions::from_mode(0o700))
            .tempdir_in(base)
    };
    runtime
        .and_then(|base| make(&base).ok())
        .map_or_else(|| make(Path::new("/tmp")), Ok)
        .map_err(|e| Trouble::internal(format!("no folder for benchd's socket could be made in /tmp: {e}")))
}

/// The simulated server.
#[derive(Debug)]
pub struct Sim {
    process: Lifelined,
    /// Its base URL.
    pub url: String,
}

#[derive(Deserialize)]
struct SimReady {
    url: String,
}

impl Sim {
    /// Starts it on a free port.
    pub fn start(options: &[String], signals: &Signals) -> Result<Sim, Trouble> {
        let mut args = vec!["--lifeline".to_owned()];
        if !options.iter().any(|option| option.starts_with("--listen")) {
            args.extend(["--listen".to_owned(), "127.0.0.1:0".to_owned()]);
        }
        args.extend_from_slice(options);
        let (process, line) =
            Lifelined::start(Sibling::Benchsim, &args, None, Stdio::piped(), BENCHSIM_READY_WITHIN, signals)?;
        let ready: SimReady = serde_json::from_str(&line).map_err(|e| {
            Trouble::internal(format!("benchsim's first line could not be read ({e}): {line}"))
        })?;
        Ok(Sim { process, url: ready.url })
    }

    /// The failure that its early end is, if it has ended.
    pub fn early_end(&mut self) -> Option<Trouble> {
        self.process.early_end("during the run")
    }

    /// Ends it, and waits.
    pub fn end(mut self) {
        self.process.end();
    }
}
