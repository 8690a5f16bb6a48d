//! A blocking client for the daemon's socket: one line out, one line in. For benchctl and for tests; no runtime.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::wire::{Failure, Reply, Request};

/// A connection to a daemon.
#[derive(Debug)]
pub struct Connection {
    reader: BufReader<UnixStream>,
    line: String,
}

/// Why a call got no value.
#[derive(Debug)]
pub enum CallError {
    /// The daemon said no.
    Refused(Failure),
    /// The connection ended or broke.
    Io(io::Error),
    /// The answer is not what this client's version expects.
    Unreadable {
        /// What serde says.
        error: serde_json::Error,
        /// Beginning of the line.
        line: String,
    },
}

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CallError::Refused(failure) => f.write_str(&failure.message),
            CallError::Io(error) => write!(f, "the connection to benchd broke: {error}"),
            CallError::Unreadable { error, line } => {
                write!(f, "benchd's answer could not be read ({error}): {line}")
            }
        }
    }
}

impl std::error::Error for CallError {}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> Self {
        CallError::Io(error)
    }
}

impl Connection {
    /// Connects to the socket at `path`.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Connection { reader: BufReader::new(UnixStream::connect(path)?), line: String::new() })
    }

    /// Sends a request.
    pub fn send(&mut self, request: &Request) -> io::Result<()> {
        self.send_line(request)
    }

    /// Sends any value as a line.
    pub fn send_line(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.reader.get_mut().write_all(&line)
    }

    /// The next line, with its newline; an early end of the stream is an error.
    pub fn read_line(&mut self) -> io::Result<&str> {
        self.line.clear();
        if self.reader.read_line(&mut self.line)? == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "benchd closed the connection"));
        }
        Ok(&self.line)
    }

    /// The next line as a value.
    pub fn read<T: DeserializeOwned>(&mut self) -> Result<T, CallError> {
        let line = self.read_line()?;
        serde_json::from_str(line)
            .map_err(|error| CallError::Unreadable { error, line: line.chars().take(200).collect() })
    }

    /// The next line as a reply.
    pub fn read_reply<T: DeserializeOwned>(&mut self) -> Result<T, CallError> {
        match self.read::<Reply>()? {
            Reply::Err(failure) => Err(CallError::Refused(failure)),
            Reply::Ok(value) => serde_json::from_str(value.get()).map_err(|error| CallError::Unreadable {
                error,
                line: value.get().chars().take(200).collect(),
            }),
        }
    }

    /// Sends a request and reads its reply.
    pub fn call<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T, CallError> {
        self.send(request)?;
        self.read_reply()
    }

    /// The underlying stream, to shut it down from another thread.
    pub fn stream(&self) -> &UnixStream {
        self.reader.get_ref()
    }
}
