//! `plan`: what a workload comes to, solved by a private benchd without a server.

use proto::spec::Spec;
use proto::wire::{Request, Secrets};

use super::{print, print_json, read_reply};
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
    let daemon = Daemon::start(&Secrets::default(), &signals)?;
    let mut connection = daemon.connect()?;
    connection.send(&Request::Plan { workload }).map_err(proto::socket::CallError::from)?;
    let (raw, spec) = read_reply::<Spec>(&mut connection)?;
    daemon.end();
    if args.talk.json {
        print_json(&raw)?
    } else {
        print(|mut out| render::spec(&spec, &mut out))?
    }
    Ok(Exit::Done)
}
