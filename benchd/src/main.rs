//! benchd: parses, binds, serves, and maps the end to an exit code.

use std::io::{BufRead, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use benchd::serve::socket::{BindError, Socket};
use clap::Parser;
use proto::wire::Secrets;
use rustix::process::{Resource, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tokio_util::sync::CancellationToken;

/// Time that the end of a run may take once the client that a private benchd belongs to is gone.
const ORPHAN_GRACE: std::time::Duration = std::time::Duration::from_millis(1500);
/// Threads that read the network, at most.
const MAX_DATA_THREADS: usize = 8;

/// The instrument: generates load against an OpenAI-compatible LLM server and measures it.
///
/// It is driven over its socket, by benchctl or by any program that speaks its protocol (one JSON object a line).
/// Most people never start it by hand: `benchctl run` starts one of its own.
#[derive(Debug, Parser)]
#[command(name = "benchd", version)]
struct Args {
    /// Where to listen for clients
    #[arg(long, env = "BENCHD_SOCKET", value_name = "PATH")]
    socket: PathBuf,
    /// Belong to the process at the other end of standard input: read secrets from its first line, print a line when
    /// ready, and end when it closes
    #[arg(long)]
    private: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("benchd: {error:#}");
            ExitCode::from(if error.is::<BindError>() { 11 } else { 1 })
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    benchd::install_tls();
    raise_file_limit();
    let quit = CancellationToken::new();
    let secrets = if args.private { secrets_from_parent()? } else { secrets_from_environment() };
    let data_threads =
        std::thread::available_parallelism().map_or(1, |n| (n.get() / 2).clamp(1, MAX_DATA_THREADS));
    let data = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(data_threads)
        .thread_name("data")
        .enable_all()
        .build()
        .context("the data plane cannot start")?;
    // The control plane has a thread of its own, so that it answers while the data plane is saturated.
    let control = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("the control plane cannot start")?;
    quit_on_signals(&quit)?;
    control.block_on(async {
        let (listener, _file) = Socket::bind(&args.socket)?.into_parts();
        if args.private {
            follow_parent(quit.clone(), args.socket.clone())?;
            println_ready()?;
        } else {
            eprintln!("benchd: listening at {}", args.socket.display());
        }
        benchd::serve::serve(listener, secrets, data.handle().clone(), quit).await;
        anyhow::Ok(())
    })?;
    if args.private {
        remove_folder(&args.socket);
    }
    // What still reads the end of an answer has nobody to tell.
    data.shutdown_background();
    Ok(())
}

fn println_ready() -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(b"{\"ready\":true}\n").and_then(|()| out.flush()).context("the parent is gone")
}

fn secrets_from_parent() -> anyhow::Result<Secrets> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).context("cannot read the secrets from standard input")?;
    // The text is not repeated: it may hold a key.
    serde_json::from_str(&line).map_err(|e| {
        anyhow::anyhow!("the first line of standard input is not the secrets' JSON (line {})", e.line())
    })
}

fn secrets_from_environment() -> Secrets {
    let key = ["BENCHD_API_KEY", "OPENAI_API_KEY"].iter().find_map(|name| std::env::var(name).ok());
    Secrets { api_key: key.filter(|k| !k.is_empty()), headers: Vec::new() }
}

/// Ends with the parent, however it ends: its end of our standard input closes.
fn follow_parent(quit: CancellationToken, socket: PathBuf) -> anyhow::Result<()> {
    std::thread::Builder::new().name("parent".to_owned()).spawn(move || {
        let mut rest = [0; 256];
        while matches!(std::io::stdin().lock().read(&mut rest), Ok(1..)) {}
        quit.cancel();
        std::thread::sleep(ORPHAN_GRACE);
        // Something holds the end up, and nobody is left to wait for it.
        let _ = std::fs::remove_file(&socket);
        remove_folder(&socket);
        std::process::exit(1);
    })?;
    Ok(())
}

/// Removes the folder that a parent made for the socket, which the parent may not be there to do any more.
fn remove_folder(socket: &std::path::Path) {
    if let Some(folder) = socket.parent() {
        // One that is not empty is not only ours, and stays.
        let _ = std::fs::remove_dir(folder);
    }
}

fn quit_on_signals(quit: &CancellationToken) -> anyhow::Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP]).context("signals")?;
    let quit = quit.clone();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            if quit.is_cancelled() {
                std::process::exit(128 + signal);
            }
            quit.cancel();
        }
    })?;
    Ok(())
}

/// Raises the soft limit of open files to the hard one; each stream needs one.
fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // The old limit stays, and `max_in_flight` tells when it is met.
    let _ = setrlimit(Resource::Nofile, limit);
}
