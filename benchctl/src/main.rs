//! `benchctl`: reads the arguments, does one command, maps what came of it to an exit code.

use std::ffi::OsString;
use std::process::ExitCode;

use benchctl::args::{self, Refusal};
use benchctl::exit::{Exit, Trouble};
use benchctl::{commands, secrets, talk};

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let exit = act(args).unwrap_or_else(|trouble| {
        talk::say(&trouble);
        trouble.exit
    });
    ExitCode::from(exit.code())
}

fn act(args: Vec<OsString>) -> Result<Exit, Trouble> {
    // First of all: while it stands in our arguments, everyone on this machine can read it.
    let from_args = secrets::take_from(&args)?;
    let command_line = args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
    match args::parse(args) {
        Ok(cli) => commands::act(cli, &from_args, command_line),
        Err(Refusal::Wrong(trouble)) => Err(trouble),
        Err(Refusal::Shown(text)) => {
            let _ = text.print();
            Ok(if text.exit_code() == 0 { Exit::Done } else { Exit::Usage })
        }
    }
}
