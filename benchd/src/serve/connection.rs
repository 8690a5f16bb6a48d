//! One client's connection: reads requests line by line, answers each in order. Waits for nobody but its own client,
//! and for that one only so long.

use std::time::Duration;

use proto::record::Row;
use proto::wire::{End, EndLine, ErrorCode, Event, Failure, MAX_REQUEST_BYTES, Request};
use serde::Serialize;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, BufWriter, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio_util::sync::CancellationToken;

use crate::engine::solve::solve;
use crate::serve::control::{Control, Finished};

/// How long a client may take to read a line.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time between two looks at whether a client that waits for its run is still there.
const PEER_CHECK: Duration = Duration::from_millis(500);

/// Serves a connection to its end, or until the daemon goes down.
pub async fn handle(stream: UnixStream, control: Control, quit: CancellationToken) {
    let (read, write) = stream.into_split();
    let mut client = Client { lines: BufReader::new(read), out: BufWriter::new(write), control, quit };
    // A connection that breaks has nobody left to tell.
    let _ = client.serve().await;
}

struct Client {
    lines: BufReader<OwnedReadHalf>,
    out: BufWriter<OwnedWriteHalf>,
    control: Control,
    quit: CancellationToken,
}

/// A reply with its value in place; on the wire the same as [`proto::wire::Reply`].
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Reply<T> {
    Ok(T),
    Err(Failure),
}

impl Client {
    async fn serve(&mut self) -> std::io::Result<()> {
        loop {
            let line = match self.read_line().await? {
                Line::Whole(line) => line,
                Line::End => return Ok(()),
                Line::TooLong => {
                    let text =
                        format!("a line is longer than {MAX_REQUEST_BYTES} bytes; the connection is closed");
                    return self.refuse(Failure::new(ErrorCode::BadRequest, text)).await;
                }
            };
            let request = match serde_json::from_slice::<Request>(&line) {
                Ok(request) => request,
                Err(error) => {
                    let text =
                        format!("not a request: {error}; see the documentation of the crate benchd-proto");
                    self.refuse(Failure::new(ErrorCode::BadRequest, text)).await?;
                    continue;
                }
            };
            match request {
                Request::Hello {} => {
                    let value = self.control.hello().await;
                    self.reply(value).await?;
                }
                Request::Status {} => {
                    let value = self.control.status().await;
                    self.reply(value).await?;
                }
                Request::Plan { workload } => {
                    let spec = workload
                        .validate()
                        .map_err(|text| Failure::new(ErrorCode::BadValue, text))
                        .and_then(|()| {
                            solve(&workload).map_err(|e| Failure::new(ErrorCode::Infeasible, e.to_string()))
                        });
                    self.reply(spec).await?;
                }
                Request::Run { plan, command_line } => self.run(plan, command_line).await?,
                Request::Smoke { target } => {
                    let value = self.control.smoke(target).await;
                    self.reply(value).await?;
                }
                Request::Stop {} => {
                    let value = self.control.stop().await;
                    self.reply(value).await?;
                }
                Request::Quit {} => {
                    let value = self.control.quit().await;
                    self.reply(value).await?;
                }
                Request::Watch {} => return self.watch().await,
            }
        }
    }

    /// The next line without its newline, however much of it is there when the daemon goes down.
    async fn read_line(&mut self) -> std::io::Result<Line> {
        let mut line = Vec::new();
        loop {
            let bytes = tokio::select! {
                biased;
                bytes = self.lines.fill_buf() => bytes?,
                () = self.quit.cancelled() => return Ok(Line::End),
            };
            if bytes.is_empty() {
                // A request without its newline was cut; nobody can know what it would have been.
                return Ok(Line::End);
            }
            let end = memchr::memchr(b'\n', bytes);
            let take = end.unwrap_or(bytes.len());
            if line.len() + take > MAX_REQUEST_BYTES {
                return Ok(Line::TooLong);
            }
            line.extend_from_slice(&bytes[..take]);
            self.lines.consume(take + usize::from(end.is_some()));
            if end.is_some() {
                return Ok(Line::Whole(line));
            }
        }
    }

    async fn refuse(&mut self, failure: Failure) -> std::io::Result<()> {
        self.reply::<()>(Err(failure)).await
    }

    async fn reply<T: Serialize>(&mut self, value: Result<T, Failure>) -> std::io::Result<()> {
        let reply = match value {
            Ok(value) => Reply::Ok(value),
            Err(failure) => Reply::Err(failure),
        };
        let mut line = serde_json::to_vec(&reply)?;
        line.push(b'\n');
        self.write(&line).await?;
        self.flush().await
    }

    async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        tokio::time::timeout(WRITE_TIMEOUT, self.out.write_all(bytes)).await?
    }

    async fn flush(&mut self) -> std::io::Result<()> {
        tokio::time::timeout(WRITE_TIMEOUT, self.out.flush()).await?
    }

    async fn run(&mut self, plan: Box<proto::plan::Plan>, command_line: Vec<String>) -> std::io::Result<()> {
        let control = self.control.clone();
        let finished = tokio::select! {
            finished = control.run(plan, command_line) => finished,
            () = gone(self.out.get_ref()) => {
                // Nobody is left to read the report: the load has no purpose any more.
                let _ = self.control.stop().await;
                return Ok(());
            }
        };
        match finished {
            Err(failure) => self.refuse(failure).await,
            Ok(finished) => self.report(finished).await,
        }
    }

    /// The report, a line for each record, and the line that proves that they are all there.
    async fn report(&mut self, finished: Finished) -> std::io::Result<()> {
        self.reply(Ok(&finished.report)).await?;
        let mut checksum = crc32fast::Hasher::new();
        let mut line = Vec::new();
        for record in &finished.records {
            line.clear();
            serde_json::to_writer(&mut line, &Row::new(record, &finished.context))?;
            line.push(b'\n');
            checksum.update(&line);
            self.write(&line).await?;
        }
        let end =
            End { records: finished.records.len() as u64, crc32: format!("{:08x}", checksum.finalize()) };
        line = serde_json::to_vec(&EndLine { end })?;
        line.push(b'\n');
        self.write(&line).await?;
        self.flush().await
    }

    async fn watch(&mut self) -> std::io::Result<()> {
        let mut events = match self.control.watch().await {
            Ok(events) => events,
            Err(failure) => return self.refuse(failure).await,
        };
        let control = self.control.clone();
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                () = gone(self.out.get_ref()) => return Ok(()),
            };
            let Some(event) = event else { break };
            self.event(&event).await?;
        }
        // The actor let go of us: because we fell behind, or because the daemon goes down.
        if control.hello().await.is_ok() {
            let reason = "events came faster than this reader took them".to_owned();
            self.event(&Event::Dropped { reason }).await?;
        }
        Ok(())
    }

    async fn event(&mut self, event: &Event) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(event)?;
        line.push(b'\n');
        self.write(&line).await?;
        self.flush().await
    }
}

enum Line {
    Whole(Vec<u8>),
    End,
    TooLong,
}

/// Returns when the peer has closed both directions. One that only closed its sending side still reads.
async fn gone(out: &OwnedWriteHalf) {
    loop {
        tokio::time::sleep(PEER_CHECK).await;
        match out.ready(Interest::WRITABLE).await {
            Ok(ready) if !ready.is_write_closed() => {}
            _ => return,
        }
    }
}
