//! `smoke`: one small request, and what the server can do.

use proto::report::SmokeReport;
use proto::wire::Request;

use super::{call, print, print_json};
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
    let mut daemon = Daemon::start(&secrets, &signals)?;
    let mut connection = daemon.connect()?;
    let request = Request::Smoke { target: Box::new(target) };
    let (raw, report) =
        call::<SmokeReport>(&mut connection, &request).map_err(|error| daemon.explain(error))?;
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
