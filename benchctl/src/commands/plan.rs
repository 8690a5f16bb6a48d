//! `plan`: what a workload comes to, solved by a private benchd without a server.

use proto::spec::Spec;
use proto::wire::{Request, Secrets};

use super::{call, print, print_json};
use crate::args::PlanArgs;
use crate::asked;
use crate::exit::{Exit, Trouble};
use crate::private::Daemon;
use crate::render;
use crate::signals::Signals;

pub(crate) fn act(args: &PlanArgs) -> Result<Exit, Trouble> {
    let workload = asked::workload(&args.workload);
    workload.validate().map_err(|text| Trouble::usage(asked::in_flags(&text)))?;
    let signals = Signals::install()?;
    let mut daemon = Daemon::start(&Secrets::default(), &signals)?;
    let mut connection = daemon.connect()?;
    let (raw, spec) =
        call::<Spec>(&mut connection, &Request::Plan { workload }).map_err(|error| daemon.explain(error))?;
    daemon.end();
    if args.talk.json {
        print_json(&raw)?
    } else {
        print(|mut out| render::spec(&spec, &mut out))?
    }
    Ok(Exit::Done)
}
