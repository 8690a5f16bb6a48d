//! From what was typed to what is asked of the daemon: defaults, the rules between flags, and a [`Plan`] whose
//! bounds [`Plan::validate`] has checked.

use std::ffi::OsString;

use proto::plan::{self, Arrival, Load, Plan, Target, Workload};
use proto::wire::Secrets;

use crate::args::{ArrivalKind, LoadArgs, RunArgs, SmokeArgs, TargetArgs, WorkloadArgs};
use crate::exit::Trouble;
use crate::secrets::{self, FromArgs};

/// A server to be asked, and how.
#[derive(Debug)]
pub struct AskedTarget {
    /// The server; its URL is [`SIM_URL`] while the simulator has none yet.
    pub target: Target,
    /// What goes to the daemon's standard input.
    pub secrets: Secrets,
    /// The simulator's arguments, when it is the server.
    pub sim: Option<Vec<String>>,
}

/// A run to be made.
#[derive(Debug)]
pub struct AskedRun {
    /// The plan.
    pub plan: Plan,
    /// What goes to the daemon's standard input.
    pub secrets: Secrets,
    /// The simulator's arguments, when it is the server.
    pub sim: Option<Vec<String>>,
    /// What was chosen for the user, a sentence each.
    pub notices: Vec<String>,
}

/// Stands for the simulator's URL until it has told it.
pub const SIM_URL: &str = "http://simulator";

/// The load of `--sim` alone: about ten seconds on the simulator's own times.
fn demo_load() -> LoadArgs {
    LoadArgs { concurrency: Some(8), num_sessions: Some(96), ..LoadArgs::default() }
}

/// The conversations of `--sim` alone.
fn demo_workload(args: &WorkloadArgs) -> WorkloadArgs {
    WorkloadArgs { isl: Some(500), osl: Some(32), hit_rate: Some(0.7), num_turns: Some(4), ..args.clone() }
}

/// A variable of our environment.
pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// Checks the arguments of a run.
pub fn run(args: &RunArgs, from_args: &FromArgs) -> Result<AskedRun, Trouble> {
    let AskedTarget { target, secrets, sim } = target(&args.target, from_args, variable)?;
    let mut notices = Vec::new();
    let is_demo = sim.is_some() && without_common(&args.load) == LoadArgs::default();
    let load_args = if is_demo { demo_load() } else { args.load.clone() };
    let workload_args = if is_demo && !shapes(&args.workload) {
        notices.push(
            "nothing was said about load and workload; taking --concurrency 8 --num-sessions 96 --num-turns 4 \
             --isl 500 --osl 32 --hit-rate 0.7"
                .to_owned(),
        );
        demo_workload(&args.workload)
    } else {
        if is_demo {
            notices
                .push("nothing was said about the load; taking --concurrency 8 --num-sessions 96".to_owned());
        }
        args.workload.clone()
    };
    let plan = Plan {
        target,
        workload: workload(&workload_args),
        load: load(&load_args)?,
        seed: args.load.seed,
        num_workers: args.load.num_workers,
        max_errors: args.load.max_errors,
        max_error_rate: args.load.max_error_rate,
        save_events: args.output.save_events,
    };
    plan.validate().map_err(|text| Trouble::usage(in_flags(&text)))?;
    if args.output.save_events && args.output.save_result.is_none() && args.output.save_dir.is_none() {
        return Err(Trouble::usage("--save-events needs --save-result or --save-dir to save them to"));
    }
    Ok(AskedRun { plan, secrets, sim, notices })
}

/// Checks the arguments of a smoke request.
pub fn smoke(args: &SmokeArgs, from_args: &FromArgs) -> Result<AskedTarget, Trouble> {
    let asked = target(&args.target, from_args, variable)?;
    asked.target.validate().map_err(|text| Trouble::usage(in_flags(&text)))?;
    Ok(asked)
}

/// The arguments of `benchctl -s`, which stand among those of a run.
pub fn smoke_of_run(args: RunArgs) -> Result<SmokeArgs, Trouble> {
    let output = &args.output;
    let saves = output.save_result.is_some() || output.save_dir.is_some();
    if args.load != LoadArgs::default() || shapes(&args.workload) || saves || output.strict.is_some() {
        return Err(Trouble::usage(
            "-s sends one small request of its own; leave out the flags of load, workload and saving, or leave out -s",
        ));
    }
    Ok(SmokeArgs { target: args.target, talk: args.talk })
}

/// Whether a flag says what the conversations look like.
fn shapes(args: &WorkloadArgs) -> bool {
    args.isl.is_some()
        || args.osl.is_some()
        || args.hit_rate.is_some()
        || args.num_turns.is_some()
        || args.shared_system_prompt_ratio.is_some()
}

/// The load flags without those that say nothing about the amount of load.
fn without_common(args: &LoadArgs) -> LoadArgs {
    LoadArgs {
        seed: None,
        num_workers: None,
        drain_timeout: None,
        max_errors: None,
        max_error_rate: None,
        ..args.clone()
    }
}

fn target(
    args: &TargetArgs,
    from_args: &FromArgs,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<AskedTarget, Trouble> {
    let sim = match &args.sim {
        None => None,
        Some(_) if args.url.is_some() => {
            return Err(Trouble::usage("give -u or --sim, not both: --sim is the server"));
        }
        Some(options) => Some(
            shlex::split(options)
                .ok_or_else(|| Trouble::usage(format!("the quotes in --sim={options} do not match")))?,
        ),
    };
    let from_env =
        || variable("OPENAI_BASE_URL").and_then(|url| url.into_string().ok()).filter(|u| !u.is_empty());
    let (url, user_info) = match (&args.url, &sim) {
        (_, Some(_)) => (SIM_URL.to_owned(), None),
        (Some(url), None) => secrets::split_user_info(url),
        (None, None) => secrets::split_user_info(&from_env().ok_or_else(|| {
            Trouble::usage(
                "no server was named; give -u URL (or OPENAI_BASE_URL), or --sim to try it on the simulator",
            )
        })?),
    };
    let ca_cert = match &args.ca_cert {
        None => None,
        Some(path) => Some(
            std::path::absolute(path)
                .ok()
                .and_then(|path| path.into_os_string().into_string().ok())
                .ok_or_else(|| Trouble::usage("the path of --ca-cert must be valid UTF-8"))?,
        ),
    };
    Ok(AskedTarget {
        target: Target {
            url,
            model: args.model.clone(),
            tokenizer: args.tokenizer.clone().or_else(|| sim.as_ref().map(|_| "builtin".to_owned())),
            headers: args.headers.clone(),
            extra_body: args.extra_body.clone().unwrap_or_default(),
            proxy: from_args.proxy.clone().or_else(|| args.proxy.clone()),
            ca_cert,
            insecure: args.insecure,
            request_timeout_s: args.request_timeout.unwrap_or(plan::DEFAULT_REQUEST_TIMEOUT_S),
            ready_timeout_s: args.ready_timeout.unwrap_or(0.0),
            metrics_url: args.metrics_url.clone(),
        },
        secrets: secrets::gather(from_args, user_info.as_deref(), args.api_key_file.as_deref(), variable)?,
        sim,
    })
}

/// The workload that the flags name.
pub fn workload(args: &WorkloadArgs) -> Workload {
    Workload {
        isl: args.isl.unwrap_or(plan::DEFAULT_ISL),
        osl: args.osl.unwrap_or(plan::DEFAULT_OSL),
        hit_rate: args.hit_rate,
        num_turns: args.num_turns.unwrap_or(1),
        shared_system_prompt_ratio: args.shared_system_prompt_ratio,
        think_time_s: args.think_time.unwrap_or(0.0),
        first_chunk_threshold: args.first_chunk_threshold.unwrap_or(plan::DEFAULT_FIRST_CHUNK_THRESHOLD),
        block_size: args.block_size.unwrap_or(plan::DEFAULT_BLOCK_SIZE),
    }
}

fn load(args: &LoadArgs) -> Result<Load, Trouble> {
    match (args.concurrency, args.request_rate) {
        (Some(_), Some(_)) => Err(Trouble::usage(
            "give --concurrency (closed loop) or --request-rate (open loop), not both; to cap what is in flight at a \
             rate, use --max-concurrency",
        )),
        (None, None) => Err(Trouble::usage(
            "give --concurrency N (closed loop: N active sessions) or --request-rate R (open loop: R requests a second)",
        )),
        (Some(concurrency), None) => closed(concurrency, args),
        (None, Some(rate)) => open(rate, args),
    }
}

fn closed(concurrency: u32, args: &LoadArgs) -> Result<Load, Trouble> {
    refuse_given(
        "--concurrency",
        &[
            ("--warm-up", args.warm_up.is_some(), "the closed loop finds the end of its warm-up by itself"),
            ("--arrival", args.arrival.is_some(), "a closed loop sends when an answer has come"),
            ("--burstiness", args.burstiness.is_some(), "a closed loop sends when an answer has come"),
            ("--max-concurrency", args.max_concurrency.is_some(), "--concurrency is the limit already"),
            ("--max-in-flight", args.max_in_flight.is_some(), "--concurrency is the limit already"),
        ],
    )?;
    let ramp_interval_s = match args.ramp_interval {
        None => None,
        Some(-1.0) => None,
        Some(s) if s < 0.0 => {
            return Err(Trouble::usage(format!(
                "--ramp-interval must be 0 or more seconds, or -1 for think time / concurrency, got {s}"
            )));
        }
        Some(s) => Some(s),
    };
    Ok(Load::Closed {
        concurrency,
        num_sessions: args.num_sessions,
        duration_s: args.duration,
        num_requests: args.num_requests,
        ramp_interval_s,
        warmup_jitter_max_s: args.warmup_jitter_max.unwrap_or(0.0),
        drain_timeout_s: args.drain_timeout.unwrap_or(plan::DEFAULT_DRAIN_TIMEOUT_S),
    })
}

fn open(request_rate_per_s: f64, args: &LoadArgs) -> Result<Load, Trouble> {
    refuse_given(
        "--request-rate",
        &[
            ("--num-sessions", args.num_sessions.is_some(), "an open loop ends by time, use --duration"),
            ("--num-requests", args.num_requests.is_some(), "an open loop ends by time, use --duration"),
            ("--ramp-interval", args.ramp_interval.is_some(), "the rate spaces the sessions' starts"),
            ("--warmup-jitter-max", args.warmup_jitter_max.is_some(), "use --warm-up"),
        ],
    )?;
    let Some(duration_s) = args.duration else {
        return Err(Trouble::usage("--request-rate needs --duration SECONDS, the length of the load"));
    };
    let arrival = match (args.arrival, args.burstiness) {
        (None | Some(ArrivalKind::Constant), None) => Arrival::Constant,
        (Some(ArrivalKind::Poisson), None) => Arrival::Poisson,
        (None | Some(ArrivalKind::Gamma), Some(burstiness)) => Arrival::Gamma { burstiness },
        (Some(ArrivalKind::Gamma), None) => {
            return Err(Trouble::usage("--arrival gamma needs --burstiness SHAPE; 1 would be Poisson"));
        }
        (Some(_), Some(_)) => {
            return Err(Trouble::usage(
                "--burstiness is the shape of --arrival gamma; use that, or leave it out",
            ));
        }
    };
    Ok(Load::Open {
        request_rate_per_s,
        duration_s,
        warm_up_s: args.warm_up.unwrap_or(0.0),
        arrival,
        max_concurrency: args.max_concurrency,
        max_in_flight: args.max_in_flight.unwrap_or(plan::DEFAULT_MAX_IN_FLIGHT),
        drain_timeout_s: args.drain_timeout.unwrap_or(plan::DEFAULT_DRAIN_TIMEOUT_S),
    })
}

/// Flags of the other mode are refused: ignoring one would run another load than the one that was meant.
fn refuse_given(mode: &str, flags: &[(&str, bool, &str)]) -> Result<(), Trouble> {
    match flags.iter().find(|(_, is_given, _)| *is_given) {
        None => Ok(()),
        Some((flag, _, why)) => Err(Trouble::usage(format!("{flag} does not go with {mode}: {why}"))),
    }
}

/// A sentence of the plan's checks with its field named as the flag that sets it.
pub fn in_flags(text: &str) -> String {
    let field = text.split_whitespace().next().unwrap_or_default();
    let flag = match field {
        "isl"
        | "osl"
        | "num_turns"
        | "first_chunk_threshold"
        | "block_size"
        | "hit_rate"
        | "burstiness"
        | "shared_system_prompt_ratio"
        | "concurrency"
        | "num_sessions"
        | "num_requests"
        | "num_workers"
        | "max_concurrency"
        | "max_error_rate"
        | "max_in_flight"
        | "metrics_url" => field,
        "request_rate_per_s" => "request_rate",
        _ => match field.strip_suffix("_s") {
            Some(name) if !name.is_empty() => name,
            _ => return text.to_owned(),
        },
    };
    format!("--{}{}", flag.replace('_', "-"), &text[field.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, parse};

    fn asked(line: &str) -> Result<AskedRun, String> {
        let words = shlex::split(&format!("benchctl {line}")).unwrap();
        let Ok(Cli { run: args, .. }) = parse(words.into_iter().map(OsString::from)) else {
            panic!("{line}")
        };
        run(&args, &FromArgs::default()).map_err(|trouble| {
            assert_eq!(trouble.exit.code(), 2);
            trouble.message
        })
    }

    fn refused(line: &str) -> String {
        asked(&format!("-u http://h {line}")).unwrap_err()
    }

    #[test]
    fn the_requirements_examples_are_taken() {
        let closed = asked(
            "-u http://localhost:8000 -m m --concurrency 8 --num-sessions 200 --isl 2000 --osl 200 --hit-rate 0.85 \
             --num-turns 5 --think-time 1.0",
        )
        .unwrap()
        .plan;
        assert_eq!(closed.workload.think_time_s, 1.0);
        assert!(matches!(closed.load, Load::Closed { concurrency: 8, num_sessions: Some(200), .. }));
        let open =
            asked("-u http://localhost:8000 --request-rate 10 --duration 120 --warm-up 10").unwrap().plan;
        assert!(matches!(open.load, Load::Open { warm_up_s: 10.0, arrival: Arrival::Constant, .. }));
    }

    #[test]
    fn the_simulator_alone_is_a_demonstration() {
        let demo = asked("--sim='--itl-ms 2 --model \"a b\"'").unwrap();
        assert_eq!(demo.sim.unwrap(), ["--itl-ms", "2", "--model", "a b"]);
        assert_eq!(demo.plan.target.tokenizer.as_deref(), Some("builtin"));
        assert_eq!(demo.plan.workload.num_turns, 4);
        assert_eq!(demo.notices.len(), 1);
        let shaped = asked("--sim --isl 3000 --seed 7").unwrap();
        assert_eq!(
            (shaped.plan.workload.isl, shaped.plan.workload.num_turns, shaped.plan.seed),
            (3000, 1, Some(7))
        );
        assert!(asked("--sim -u http://h").unwrap_err().contains("not both"));
    }

    #[test]
    fn flags_of_the_other_mode_are_refused_with_what_to_use() {
        for (line, want) in [
            ("--concurrency 8 --num-sessions 9 --warm-up 3", "finds the end of its warm-up by itself"),
            (
                "--concurrency 8 --num-sessions 9 --arrival poisson",
                "--arrival does not go with --concurrency",
            ),
            ("--request-rate 8 --num-sessions 9", "use --duration"),
            ("--request-rate 8 --duration 9 --warmup-jitter-max 1", "use --warm-up"),
            ("--request-rate 8 --concurrency 9", "not both"),
            ("--isl 100", "give --concurrency N"),
            ("--request-rate 8", "--request-rate needs --duration"),
            ("--request-rate 8 --duration 9 --arrival gamma", "needs --burstiness"),
            (
                "--request-rate 8 --duration 9 --arrival poisson --burstiness 2",
                "the shape of --arrival gamma",
            ),
            ("--concurrency 8", "a closed loop needs an end"),
            ("--concurrency 8 --num-sessions 9 --ramp-interval -2", "-1 for think time / concurrency"),
            ("--concurrency 8 --num-sessions 9 --save-events", "needs --save-result"),
        ] {
            let got = refused(line);
            assert!(got.contains(want), "{line}: {got}");
        }
        assert!(asked("--concurrency 8").unwrap_err().contains("no server was named"));
    }

    #[test]
    fn bounds_name_the_flag() {
        for (line, want) in [
            ("--concurrency 0 --num-sessions 9", "--concurrency must be from 1 to 1000000, got 0"),
            ("--request-rate 0 --duration 9", "--request-rate must be above 0 and at most 1000000, got 0"),
            ("--request-rate -3 --duration 9", "--request-rate must be above 0 and at most 1000000, got -3"),
            ("--request-rate 1 --duration 1e300", "--duration must be above 0"),
            ("--request-rate 1 --duration 9 --warm-up 9", "the warm-up must be shorter than the duration"),
            ("--concurrency 1 --num-sessions 9 --hit-rate 1.2", "--hit-rate must be from 0 to 1, got 1.2"),
            ("--concurrency 1 --num-sessions 9 --think-time -1", "--think-time must be from 0 to"),
            ("--concurrency 1 --num-sessions 9 --request-timeout 0", "--request-timeout must be above 0"),
            ("--concurrency 1 --num-sessions 9 --metrics-url on", "--metrics-url must start with http://"),
        ] {
            let got = refused(line);
            assert!(got.starts_with(want), "{line}: {got}");
        }
    }

    #[test]
    fn a_smoke_request_takes_no_flags_of_a_load() {
        let args = |line: &str| {
            let words = shlex::split(&format!("benchctl {line}")).unwrap();
            let Ok(Cli { run, .. }) = parse(words.into_iter().map(OsString::from)) else { panic!("{line}") };
            run
        };
        assert!(smoke_of_run(args("-s -u http://h -m m --json")).is_ok());
        assert!(smoke_of_run(args("-s -u http://h --concurrency 8")).is_err());
    }
}
