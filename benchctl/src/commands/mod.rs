//! The commands, one file each. A command that talks to a daemon, rather than to a private one, belongs here too.

mod plan;
pub(crate) mod run;
mod smoke;

use std::io::{self, Write};

use proto::socket::{CallError, Connection};
use proto::wire::Request;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::args::{Cli, Command};
use crate::asked;
use crate::exit::{Exit, Trouble};
use crate::secrets::FromArgs;

/// Does what the command line says.
pub fn act(cli: Cli, from_args: &FromArgs, command_line: Vec<String>) -> Result<Exit, Trouble> {
    match cli.command {
        Some(Command::Run(args)) => run::act(&args, from_args, command_line),
        Some(Command::Smoke(args)) => smoke::act(&args, from_args),
        Some(Command::Plan(args)) => plan::act(&args),
        None if cli.smoke => smoke::act(&asked::smoke_of_run(cli.run)?, from_args),
        None => run::act(&cli.run, from_args, command_line),
    }
}

/// Prints an answer on stdout. A reader that has gone away has read enough.
fn print(render: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Trouble> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    match render(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Trouble::new(Exit::OutputFile, format!("stdout could not be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// Prints a value as it came from the daemon.
fn print_json(value: &RawValue) -> Result<(), Trouble> {
    print(|out| writeln!(out, "{value}"))
}

/// Sends a request; its answer as it came, and what it says.
fn call<T: DeserializeOwned>(
    connection: &mut Connection,
    request: &Request,
) -> Result<(Box<RawValue>, T), CallError> {
    connection.send(request)?;
    let raw: Box<RawValue> = connection.read_reply()?;
    let value = serde_json::from_str(raw.get())
        .map_err(|error| CallError::Unreadable { error, line: raw.get().chars().take(200).collect() })?;
    Ok((raw, value))
}
