//! Where and by what a run was made, for its report.

use proto::report::Environment;
use proto::wire::PROTOCOL_VERSION;

use crate::engine::clock::Clock;

/// Describes the machine and this program.
pub fn describe(command_line: Vec<String>, seed: u64, plan_hash: String, clock: &Clock) -> Environment {
    let uname = rustix::system::uname();
    let text = |s: &std::ffi::CStr| s.to_string_lossy().into_owned();
    Environment {
        benchd_version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol_version: PROTOCOL_VERSION,
        host: text(uname.nodename()),
        os: format!("{} {} {}", text(uname.sysname()), text(uname.release()), text(uname.machine())),
        cpus: std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX)),
        command_line,
        seed,
        plan_hash,
        started_at_epoch_s: clock.origin_epoch_ms() / 1e3,
        origin_monotonic_ns: clock.origin_monotonic_ns(),
    }
}
