//! One connection's socket: reads requests, writes bytes, notices when the client is gone.
//!
//! The socket is shared with the pacer, which writes while a script is played; then only reads happen here.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use tokio::net::TcpStream;

use crate::clock::now_ns;
use crate::http::{self, Malformed, Parsed, Request};

/// Bytes read ahead of need while an answer is being written; a client that sends more is not read further.
const READ_AHEAD: usize = 1 << 20;
/// Least room for one read, in bytes; as much again as is there already, so that idle connections stay small.
const READ: usize = 4 * 1024;

pub(crate) struct Wire {
    pub(crate) socket: Arc<TcpStream>,
    read: Vec<u8>,
}

/// A request and when it came.
pub(crate) struct Arrived {
    pub(crate) request: Result<Request, Malformed>,
    pub(crate) first_byte_ns: u64,
    pub(crate) read_ns: u64,
}

impl Wire {
    pub(crate) fn new(socket: TcpStream) -> Self {
        Self { socket: Arc::new(socket), read: Vec::new() }
    }

    /// The next request; nothing once the client has closed.
    pub(crate) async fn request(&mut self) -> io::Result<Option<Arrived>> {
        let mut first_byte_ns = (!self.read.is_empty()).then(now_ns);
        let mut told_to_continue = false;
        loop {
            if !self.read.is_empty() {
                match http::parse(&self.read) {
                    Ok(Parsed::Partial { expects_continue }) => {
                        if expects_continue && !told_to_continue {
                            told_to_continue = true;
                            self.write(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
                        }
                    }
                    parsed => {
                        let request = parsed.map(|parsed| match parsed {
                            Parsed::Whole { request, taken } => {
                                self.read.drain(..taken);
                                request
                            }
                            Parsed::Partial { .. } => unreachable!("handled above"),
                        });
                        let read_ns = now_ns();
                        return Ok(Some(Arrived {
                            request,
                            first_byte_ns: first_byte_ns.unwrap_or(read_ns),
                            read_ns,
                        }));
                    }
                }
            }
            if self.fill().await? == 0 {
                return Ok(None);
            }
            first_byte_ns.get_or_insert_with(now_ns);
        }
    }

    /// Writes all of `bytes`.
    pub(crate) async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.socket.writable().await?;
            match self.socket.try_write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Ends when the client has closed or reset the connection. What it sends meanwhile is kept.
    pub(crate) async fn gone(&mut self) {
        while self.read.len() < READ_AHEAD {
            if !matches!(self.fill().await, Ok(1..)) {
                return;
            }
        }
        std::future::pending().await
    }

    /// Reads what is there, or waits for it; 0 at the end.
    async fn fill(&mut self) -> io::Result<usize> {
        loop {
            self.socket.readable().await?;
            self.read.reserve(READ.max(self.read.len()));
            match self.socket.try_read_buf(&mut self.read) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
        }
    }
}
