//! `smoke`: one small request, and what the server can do.

use proto::report::SmokeReport;
use proto::socket::CallError;
use proto::wire::Request;

use super::{print, print_json, read_reply};
use crate::args::SmokeArgs;
use crate::asked::{self, AskedTarget};
use crate::exit::{Exit, Trouble};
use crate::private::{Daemon, Sim};
use crate::render;
use crate::secrets::FromArgs;
use crate::signals::Signals;

pub(crate) fn act(args: &SmokeArgs, from_args: &FromArgs) -> Result<Exit, Trouble> {
    let AskedTarget { mut target, secrets, sim } = asked::smoke(args, from_args)?;
    let signals = Signals::install()?;
    let sim = sim.map(|options| Sim::start(&options, &signals)).transpose()?;
    if let Some(sim) = &sim {
        target.url.clone_from(&sim.url);
    }
    let daemon = Daemon::start(&secrets, &signals)?;
    let mut connection = daemon.connect()?;
    connection.send(&Request::Smoke { target: Box::new(target) }).map_err(CallError::from)?;
    let (raw, report) = read_reply::<SmokeReport>(&mut connection)?;
    daemon.end();
    if let Some(sim) = sim {
        sim.end();
    }
    if args.talk.json {
        print_json(&raw)?
    } else {
        print(|mut out| render::smoke(&report, &mut out))?
    }
    Ok(Exit::Done)
}
