//! `benchsim`: a simulated OpenAI-compatible LLM server that logs what really happened.
//!
//! ```text
//! wire → http → api → exchange ─┬─ tokens, template → cache ─┬─ script → pacer → socket
//!                               └─ replies, timing ──────────┘            └→ truth, metrics
//! ```
//!
//! It is the ruler that the load generator is checked with, so it shares no code with it.

mod options;

mod http;
mod wire;

mod api;
mod template;
mod tokens;

mod cache;
mod replies;
mod timing;

mod clock;
mod pacer;
mod script;

mod faults;

mod exchange;
mod server;

mod metrics;
mod truth;

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result};
use clap::Parser;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::options::Options;
use crate::replies::Author;
use crate::server::Sim;
use crate::tokens::Tokens;
use crate::truth::{Truth, TruthSender};

fn main() -> ExitCode {
    let options = Options::parse();
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("benchsim: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<()> {
    raise_file_limit();
    let tokens = Tokens::load(&options.tokenizer)?;
    let author = Author::new(options.seed, options.reply, &tokens)?;
    // Requests are read on one thread; scripts are played on the pacer's, texts handled on two more.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(2).build()?;
    runtime.block_on(async {
        // Before the ready line: a signal right after it must already end us cleanly.
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let stop = CancellationToken::new();
        let listener =
            listen(options.listen).with_context(|| format!("cannot listen on {}", options.listen))?;
        let url = format!("http://{}", listener.local_addr()?);
        let truth =
            options.truth.as_deref().map(|path| Truth::create(path, &header(&options, &url))).transpose()?;
        let sender = truth.as_ref().map_or_else(TruthSender::none, Truth::sender);
        let lifeline = options.lifeline;
        let sim = Arc::new(Sim::new(options, tokens, author, sender)?);
        if lifeline {
            hold_lifeline(stop.clone())?;
        }
        say_ready(&url)?;
        let serving = tokio::spawn(server::serve(Arc::clone(&sim), listener, stop.clone()));
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = stop.cancelled() => {}
        }
        stop.cancel();
        serving.await.context("server")?;
        let end = report(&sim);
        truth.map_or(Ok(()), |truth| truth.finish(end))
    })
}

/// Listens with the longest queue that the kernel gives: a load generator may open all its connections at
/// once, and a full queue resets some of them.
fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(65_535)
}

/// The one line on stdout.
fn say_ready(url: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, r#"{{"url":"{url}","pid":{}}}"#, std::process::id())?;
    Ok(out.flush()?)
}

/// The truth log's first line. Arguments are kept as given, but for the key.
fn header(options: &Options, url: &str) -> Value {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    for at in 0..args.len() {
        if args[at].starts_with("--api-key=") {
            args[at] = "--api-key=…".into();
        } else if at > 0 && args[at - 1] == "--api-key" {
            args[at] = "…".into();
        }
    }
    json!({
        "benchsim": env!("CARGO_PKG_VERSION"), "args": args, "options": options, "url": url,
        "pid": std::process::id(), "started_ns": clock::now_ns(),
    })
}

/// Says on stderr how well the schedule was kept; the same as a value.
fn report(sim: &Sim) -> Value {
    let (metrics, late) = (&sim.metrics, sim.metrics.lateness.summary_us());
    let (requests, events) = (metrics.requests.load(Relaxed), metrics.events.load(Relaxed));
    let peak = metrics.peak_running.load(Relaxed);
    let us = |value: Option<f64>| value.map_or("none".to_owned(), |us| format!("{us:.0} µs"));
    eprintln!(
        "benchsim: {requests} requests, {events} content events, late p50 {} p99 {} max {}, {peak} at a time at most",
        us(late.p50),
        us(late.p99),
        us(late.max),
    );
    json!({"end": true, "requests": requests, "events": events, "late_us": late, "peak_concurrent": peak})
}

/// Ends us when stdin does: the parent holds its other end, and is gone then, however it went.
fn hold_lifeline(stop: CancellationToken) -> Result<()> {
    let wait = move || {
        let mut stdin = std::io::stdin().lock();
        let mut rest = [0; 256];
        while matches!(stdin.read(&mut rest), Ok(1..)) {}
        stop.cancel();
    };
    std::thread::Builder::new().name("lifeline".into()).spawn(wait).context("lifeline thread")?;
    Ok(())
}

/// Thousands of connections need more files than the usual soft limit.
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(e) = setrlimit(Resource::Nofile, limit) {
        eprintln!("benchsim: cannot raise the file limit: {e}");
    }
}
