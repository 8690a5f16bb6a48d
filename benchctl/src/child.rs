//! A sibling that we started: own process group, our end of its standard input as its lifeline, one line on its
//! standard output when it is ready. It is ended, and waited for, on every way out.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::exit::Trouble;
use crate::secrets;
use crate::siblings::Sibling;
use crate::signals::Signals;

/// Time that a child has to end after its lifeline was closed; then it is killed.
const END_WITHIN: Duration = Duration::from_secs(5);
/// Bytes of a child's stderr that are kept for an error message; the beginning says what is wrong.
const STDERR_KEPT: u64 = 16 * 1024;

/// A running sibling.
#[derive(Debug)]
pub struct Lifelined {
    sibling: Sibling,
    child: Child,
    stdin: Option<ChildStdin>,
    stderr: Option<std::thread::JoinHandle<String>>,
    signals: Signals,
}

impl Lifelined {
    /// Starts it, writes `first_line` to its standard input, and waits for its first line.
    pub fn start(
        sibling: Sibling,
        args: &[String],
        first_line: Option<&str>,
        stderr: Stdio,
        ready_within: Duration,
        signals: &Signals,
    ) -> Result<(Lifelined, String), Trouble> {
        let name = sibling.name();
        let path = sibling.find()?;
        let mut command = Command::new(&path);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr);
        // Ctrl-C in a terminal reaches a whole group; it is ours to pass on.
        command.process_group(0);
        secrets::keep_from(&mut command);
        let mut child = command
            .spawn()
            .map_err(|e| Trouble::internal(format!("{} could not be started: {e}", path.display())))?;
        signals.add_child(child.id());
        let stdout = child.stdout.take().expect("stdout was asked to be piped");
        let stderr = child.stderr.take().map(|stderr| std::thread::spawn(move || beginning_of(stderr)));
        let stdin = child.stdin.take();
        let mut lifelined = Lifelined { sibling, child, stdin, stderr, signals: signals.clone() };
        if let (Some(line), Some(stdin)) = (first_line, lifelined.stdin.as_mut()) {
            // A child that ended already is found out about below.
            let _ = writeln!(stdin, "{line}").and_then(|()| stdin.flush());
        }
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let mut out = BufReader::new(stdout);
            let mut line = String::new();
            let _ = out.read_line(&mut line);
            let _ = sender.send(line);
            // Nothing more is expected; read on, so that it never blocks or breaks on us.
            let _ = std::io::copy(&mut out, &mut std::io::sink());
        });
        match receiver.recv_timeout(ready_within) {
            Ok(line) if !line.is_empty() => Ok((lifelined, line)),
            Ok(_) => Err(lifelined.how_it_ended("before it was ready")),
            Err(_) => {
                Err(Trouble::internal(format!("{name} was not ready within {} s", ready_within.as_secs())))
            }
        }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The failure that its early end is, if it has ended.
    pub fn early_end(&mut self, when: &str) -> Option<Trouble> {
        let has_ended = matches!(self.child.try_wait(), Ok(Some(_)));
        has_ended.then(|| self.how_it_ended(when))
    }

    /// Waits for its end and tells it with what it wrote to stderr.
    fn how_it_ended(&mut self, when: &str) -> Trouble {
        let status = self.wait(END_WITHIN);
        let said = self.stderr.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        // A sentence, as all our errors are.
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        let how = status.map_or("it does not end".to_owned(), describe);
        let name = self.sibling.name();
        let message = match said.as_str() {
            "" => format!("{name} ended {when} ({how})"),
            said => format!("{name} ended {when} ({how}): {said}"),
        };
        // benchsim's arguments are the user's; 2 is its code for wrong ones.
        match (self.sibling, status.and_then(|status| status.code())) {
            (Sibling::Benchsim, Some(2)) => Trouble::usage(message),
            _ => Trouble::internal(message),
        }
    }

    /// Closes its lifeline and waits for its end; kills it when that does not come.
    pub fn end(&mut self) {
        drop(self.stdin.take());
        self.wait(END_WITHIN);
    }

    fn wait(&mut self, within: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + within;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    self.signals.forget_child(self.child.id());
                    return Some(status);
                }
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                Ok(None) | Err(_) => break,
            }
        }
        let _ = self.child.kill();
        let status = self.child.wait().ok();
        self.signals.forget_child(self.child.id());
        status
    }
}

impl Drop for Lifelined {
    fn drop(&mut self) {
        self.end();
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

fn beginning_of(mut stderr: impl Read) -> String {
    let mut kept = Vec::new();
    let _ = stderr.by_ref().take(STDERR_KEPT).read_to_end(&mut kept);
    let _ = std::io::copy(&mut stderr, &mut std::io::sink());
    String::from_utf8_lossy(&kept).into_owned()
}
