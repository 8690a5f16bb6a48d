//! The command line: every flag, its unit and its default. What was typed becomes a plan in `asked`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use serde_json::{Map, Value};

use crate::exit::{Strict, Trouble};

const EXAMPLES: &str = "\
Examples:
  benchctl run --sim                                      try it, without a server
  benchctl -s -u http://localhost:8000 -m my-model        one small request: is it there?
  benchctl plan --isl 2000 --osl 200 --hit-rate 0.85 --num-turns 5
  benchctl -u http://localhost:8000 -m meta-llama/Llama-3-8B-Instruct \\
      --concurrency 8 --num-sessions 200 --isl 2000 --osl 200 --hit-rate 0.85 --num-turns 5 \\
      --think-time 1.0 --save-result results.json
  benchctl -u http://localhost:8000 -m meta-llama/Llama-3-8B-Instruct \\
      --request-rate 10 --duration 120 --warm-up 10 \\
      --isl 2000 --osl 200 --hit-rate 0.85 --num-turns 5

Exit codes: 0 done, 1 internal, 2 usage or infeasible, 3 suspect under --strict, 5 every request
failed, 6 server unreachable, 7 key refused, 8 unknown model, 9 tokenizer, 10 output file, 11 refused,
130/143 stopped by SIGINT/SIGTERM.";

/// Measures OpenAI-compatible LLM servers under multi-turn load, and says how far its numbers can be trusted
///
/// Without a subcommand, `benchctl FLAGS` is `benchctl run FLAGS`, and `benchctl -s FLAGS` is `benchctl smoke
/// FLAGS`.
#[derive(Debug, Parser)]
#[command(name = "benchctl", version, after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
#[command(arg_required_else_help = true)]
pub struct Cli {
    /// What to do; without it, a run.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Send one small request and say what the server can do (as `benchctl smoke`)
    #[arg(short = 's', long)]
    pub smoke: bool,
    /// Flags of a run without its name.
    #[command(flatten)]
    pub run: RunArgs,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a benchmark: --concurrency (closed loop) or --request-rate (open loop)
    Run(Box<RunArgs>),
    /// Send one small request; print TTFT, latency, tokens, models and what the server supports
    Smoke(Box<SmokeArgs>),
    /// Solve a workload without a server: tokens of every turn and the feasible ranges
    Plan(PlanArgs),
}

/// Flags of `run`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    /// The server.
    #[command(flatten)]
    pub target: TargetArgs,
    /// The conversations.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// How many and when.
    #[command(flatten)]
    pub load: LoadArgs,
    /// What is printed and saved.
    #[command(flatten)]
    pub output: OutputArgs,
    /// What all commands know.
    #[command(flatten)]
    pub talk: TalkArgs,
}

/// Flags of `smoke`.
#[derive(Debug, Args)]
pub struct SmokeArgs {
    /// The server.
    #[command(flatten)]
    pub target: TargetArgs,
    /// What all commands know.
    #[command(flatten)]
    pub talk: TalkArgs,
}

/// Flags of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The conversations.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// What all commands know.
    #[command(flatten)]
    pub talk: TalkArgs,
}

/// The server under test.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Server")]
pub struct TargetArgs {
    /// Base URL, with or without /v1 [default: $OPENAI_BASE_URL]
    #[arg(short = 'u', long, alias = "base-url", value_name = "URL")]
    pub url: Option<String>,
    /// Model name as the server knows it [default: the only one that it lists]
    #[arg(short = 'm', long, value_name = "NAME")]
    pub model: Option<String>,
    /// A tokenizer.json, a folder that holds one, a Hugging Face name, `server` or `builtin`
    /// [default: the model's name, then `server`; with --sim `builtin`]
    #[arg(long, value_name = "WHICH")]
    pub tokenizer: Option<String>,
    /// Start the simulated server `benchsim` as the target; OPTIONS are its arguments, as in --sim='--itl-ms 20'
    #[arg(long, value_name = "OPTIONS", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub sim: Option<String>,
    /// API key; better in a file or in BENCHD_API_KEY or OPENAI_API_KEY
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// File that holds the API key
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Extra request header, as 'Name: value' (repeatable)
    #[arg(long = "header", value_name = "HEADER", value_parser = header)]
    pub headers: Vec<(String, String)>,
    /// JSON object whose fields go into every request body, over our own
    #[arg(long, value_name = "JSON", value_parser = json_object)]
    pub extra_body: Option<Map<String, Value>>,
    /// HTTP proxy [default: none, whatever the environment says]
    #[arg(long, value_name = "URL")]
    pub proxy: Option<String>,
    /// PEM file of a certificate authority to trust beside the system's
    #[arg(long, value_name = "FILE")]
    pub ca_cert: Option<PathBuf>,
    /// Accept any TLS certificate
    #[arg(long)]
    pub insecure: bool,
    /// Seconds after which a request counts as timed out [default: 300]
    #[arg(long, value_name = "S", value_parser = number, allow_negative_numbers = true)]
    pub request_timeout: Option<f64>,
    /// Seconds to wait for a server that is not there yet or still loading [default: 0]
    #[arg(long, value_name = "S", value_parser = number, allow_negative_numbers = true)]
    pub ready_timeout: Option<f64>,
    /// The server's own metrics, in Prometheus' text format; `off`: ask for none [default: /metrics beside the API]
    #[arg(long, value_name = "URL")]
    pub metrics_url: Option<String>,
}

/// The shape of the conversations.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Workload")]
pub struct WorkloadArgs {
    /// Average input tokens over all turns, chat template included [default: 1000]
    #[arg(long, value_name = "TOKENS", value_parser = whole_u32, allow_negative_numbers = true)]
    pub isl: Option<u32>,
    /// Output tokens of each turn [default: 100]
    #[arg(long, value_name = "TOKENS", value_parser = whole_u32, allow_negative_numbers = true)]
    pub osl: Option<u32>,
    /// Share of prompt tokens that the server's prefix cache can hold, 0 to 1 [default: what the history alone gives]
    #[arg(long, value_name = "SHARE", value_parser = number, allow_negative_numbers = true)]
    pub hit_rate: Option<f64>,
    /// Turns of a session [default: 1]
    #[arg(long, value_name = "N", value_parser = whole_u32, allow_negative_numbers = true)]
    pub num_turns: Option<u32>,
    /// Share of the system prompt that all sessions have in common, 0 to 1
    /// [default: 0, raised with a notice where 0 is infeasible]
    #[arg(long, value_name = "SHARE", value_parser = number, allow_negative_numbers = true)]
    pub shared_system_prompt_ratio: Option<f64>,
    /// Seconds between an answer and the session's next turn [default: 0]
    #[arg(long, value_name = "S", value_parser = number, allow_negative_numbers = true)]
    pub think_time: Option<f64>,
    /// Content events before the first-chunk latency (FC) is taken; short: -fc [default: 16]
    #[arg(long, value_name = "N", value_parser = whole_u32, allow_negative_numbers = true)]
    pub first_chunk_threshold: Option<u32>,
    /// Tokens in a block of the server's prefix cache, for the by-blocks figures [default: 16]
    #[arg(long, value_name = "TOKENS", value_parser = whole_u32, allow_negative_numbers = true)]
    pub block_size: Option<u32>,
}

/// How requests are brought to the server.
#[derive(Clone, Debug, Default, PartialEq, Args)]
#[command(next_help_heading = "Load")]
pub struct LoadArgs {
    /// Closed loop: sessions that are active at a time
    #[arg(long, value_name = "N", value_parser = whole_u32, allow_negative_numbers = true)]
    pub concurrency: Option<u32>,
    /// Closed loop: sessions to run after the first N, which are warm-up
    #[arg(long, value_name = "N", value_parser = whole_u64, allow_negative_numbers = true)]
    pub num_sessions: Option<u64>,
    /// Closed loop: requests, after those of the first sessions, after which no turn starts
    #[arg(long, value_name = "N", value_parser = whole_u64, allow_negative_numbers = true)]
    pub num_requests: Option<u64>,
    /// Closed loop: seconds between the first sessions' starts; -1: think time / concurrency [default: -1]
    #[arg(long, value_name = "S", value_parser = number, allow_negative_numbers = true)]
    pub ramp_interval: Option<f64>,
    /// Closed loop: longest random delay added between turns during warm-up, in seconds [default: 0]
    #[arg(long, value_name = "S", value_parser = number, allow_negative_numbers = true)]
    pub warmup_jitter_max: Option<f64>,
    /// Open loop: requests a second, whatever the server does
    #[arg(long, value_name = "PER_S", value_parser = number, allow_negative_numbers = true)]
    pub request_rate: Option<f64>,
    /// Seconds of load, warm-up included; an open loop needs it, a closed one may have it
    #[arg(long, value_name = "S", value_parser = number, allow_negative_numbers = true)]
    pub duration: Option<f64>,
    /// Open loop: seconds at the start that do not count; the closed loop finds its warm-up itself [default: 0]
    #[arg(long, value_name = "S", value_parser = number, allow_negative_numbers = true)]
    pub warm_up: Option<f64>,
    /// Open loop: spacing of the requests [default: constant]
    #[arg(long, value_enum, value_name = "HOW")]
    pub arrival: Option<ArrivalKind>,
    /// Open loop: shape of gamma arrivals; 1 is Poisson, below 1 burstier, above 1 more even
    #[arg(long, value_name = "SHAPE", value_parser = number, allow_negative_numbers = true)]
    pub burstiness: Option<f64>,
    /// Open loop: requests in flight above which one waits for its turn [default: no such cap]
    #[arg(long, value_name = "N", value_parser = whole_u32, allow_negative_numbers = true)]
    pub max_concurrency: Option<u32>,
    /// Open loop: requests in flight above which one is refused and recorded as such [default: 10000]
    #[arg(long, value_name = "N", value_parser = whole_u32, allow_negative_numbers = true)]
    pub max_in_flight: Option<u32>,
    /// Seconds that what is in flight at the end is waited for [default: 60]
    #[arg(long, value_name = "S", value_parser = number, allow_negative_numbers = true)]
    pub drain_timeout: Option<f64>,
    /// Stop the run, with its report, when more than N requests have failed [default: no limit]
    #[arg(long, value_name = "N", value_parser = whole_u64, allow_negative_numbers = true)]
    pub max_errors: Option<u64>,
    /// Stop the run when more than this share of the requests has failed, from 20 on [default: no limit]
    #[arg(long, value_name = "SHARE", value_parser = number, allow_negative_numbers = true)]
    pub max_error_rate: Option<f64>,
    /// Seed of prompts and arrivals [default: a fresh one each time, shown and saved]
    #[arg(long, value_name = "N", value_parser = whole_u64, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Threads that make prompts; no effect on what is sent [default: one for each two cores]
    #[arg(long, value_name = "N", value_parser = whole_u32, allow_negative_numbers = true)]
    pub num_workers: Option<u32>,
}

/// What is printed and saved of a run.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Save the report and every request's record here, as JSON
    #[arg(long, value_name = "FILE")]
    pub save_result: Option<PathBuf>,
    /// Folder for a --save-result without one; alone: save there under a name made of load and time
    #[arg(long, value_name = "DIR")]
    pub save_dir: Option<PathBuf>,
    /// Replace an existing file
    #[arg(long)]
    pub force: bool,
    /// Save the gap before each content event, and its tokens, with every record
    #[arg(long)]
    pub save_events: bool,
    /// Print each failure as it happens, on stderr
    #[arg(long)]
    pub log_failures: bool,
    /// Exit with 3 when the verdict is suspect; =client: only for reasons of the client's own making
    #[arg(long, value_enum, value_name = "KIND", num_args = 0..=1, require_equals = true, default_missing_value = "any")]
    pub strict: Option<Strict>,
}

/// What all commands know.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct TalkArgs {
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
    /// No progress and no notices on stderr
    #[arg(short = 'q', long)]
    pub quiet: bool,
}

/// Spacing of an open loop's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ArrivalKind {
    /// Equal gaps
    Constant,
    /// Exponential gaps
    Poisson,
    /// Gamma gaps, with --burstiness
    Gamma,
}

/// Reads the command line. `Err` holds what clap wants printed: help and version (code 0), or one sentence.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Refusal> {
    let args = args.into_iter().map(rewrite_short_pair).collect::<Vec<_>>();
    if args.iter().skip(1).any(|arg| arg == "-i" || arg == "--interactive") {
        return Err(Refusal::Wrong(Trouble::usage(
            "the interactive mode (-i) is not in this version; use `benchctl run`, `benchctl smoke` or `benchctl plan`",
        )));
    }
    Cli::try_parse_from(args).map_err(|error| {
        use clap::error::ErrorKind;
        match error.kind() {
            ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Refusal::Shown(error),
            _ => Refusal::Wrong(Trouble::usage(sentence(&error))),
        }
    })
}

/// Why there is nothing to do.
#[derive(Debug)]
pub enum Refusal {
    /// Help or version was asked for.
    Shown(clap::Error),
    /// Something is wrong with the arguments.
    Wrong(Trouble),
}

/// The whole help text, for the tests.
pub fn help() -> String {
    Cli::command().term_width(100).render_help().to_string()
}

/// clap knows no short flags of two letters.
fn rewrite_short_pair(arg: OsString) -> OsString {
    match arg.to_str() {
        Some("-fc") => "--first-chunk-threshold".into(),
        Some(text) => match text.strip_prefix("-fc=") {
            Some(value) => format!("--first-chunk-threshold={value}").into(),
            None => arg,
        },
        None => arg,
    }
}

/// clap's message without its headings and usage lines.
fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let parts: Vec<String> = text
        .split("\n\n")
        .map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "))
        .take_while(|part| !part.starts_with("Usage:") && !part.starts_with("For more information"))
        .collect();
    let joined = parts.join("; ");
    joined.strip_prefix("error: ").unwrap_or(&joined).to_owned()
}

fn number(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(value),
        _ => Err("must be a number".to_owned()),
    }
}

fn whole_u64(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix('+').unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err("must be a whole number, not negative".to_owned());
    }
    digits.parse().map_err(|_| format!("is too large; the most is {}", u64::MAX))
}

fn whole_u32(text: &str) -> Result<u32, String> {
    u32::try_from(whole_u64(text)?)
        .map_err(|_| format!("is too large; no such value goes above {}", u32::MAX))
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("must read 'Name: value'")?;
    let (name, value) = (name.trim(), value.trim());
    let is_token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if name.is_empty() || !name.bytes().all(is_token) {
        return Err("must begin with a header's name, of letters, digits and dashes".to_owned());
    }
    if value.chars().any(|c| c.is_control() && c != '\t') {
        return Err("must be one line".to_owned());
    }
    Ok((name.to_owned(), value.to_owned()))
}

fn json_object(text: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err("must be a JSON object, such as {\"top_p\":0.9}".to_owned()),
        Err(error) => Err(format!("must be a JSON object, such as {{\"top_p\":0.9}}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_args(line: &str) -> Result<RunArgs, String> {
        let words = shlex::split(&format!("benchctl {line}")).unwrap();
        match parse(words.into_iter().map(OsString::from)) {
            Ok(Cli { command: None, run, .. }) => Ok(run),
            Ok(Cli { command: Some(Command::Run(run)), .. }) => Ok(*run),
            Ok(other) => panic!("{other:?}"),
            Err(Refusal::Wrong(trouble)) => Err(trouble.message),
            Err(Refusal::Shown(text)) => Err(text.to_string()),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_short_pair_is_the_first_chunk_threshold() {
        for line in ["-fc 7", "-fc=7", "run -fc 7", "--first-chunk-threshold 7"] {
            assert_eq!(run_args(line).unwrap().workload.first_chunk_threshold, Some(7), "{line}");
        }
    }

    #[test]
    fn optional_values_need_their_equals_sign() {
        let run = run_args("run --sim --strict --concurrency 8").unwrap();
        assert_eq!(run.target.sim.as_deref(), Some(""));
        assert_eq!(run.output.strict, Some(Strict::Any));
        let run = run_args("run --sim='--itl-ms 20' --strict=client").unwrap();
        assert_eq!(run.target.sim.as_deref(), Some("--itl-ms 20"));
        assert_eq!(run.output.strict, Some(Strict::Client));
    }

    #[test]
    fn negative_numbers_are_numbers() {
        assert_eq!(run_args("--ramp-interval -1").unwrap().load.ramp_interval, Some(-1.0));
        assert_eq!(
            run_args("--isl -5").unwrap_err(),
            "invalid value '-5' for '--isl <TOKENS>': must be a whole number, not negative"
        );
    }

    #[test]
    fn values_that_are_no_numbers_get_one_sentence() {
        for (line, want) in [
            ("--isl abc", "invalid value 'abc' for '--isl <TOKENS>': must be a whole number, not negative"),
            ("--request-rate nan", "invalid value 'nan' for '--request-rate <PER_S>': must be a number"),
            ("--request-rate inf", "invalid value 'inf' for '--request-rate <PER_S>': must be a number"),
            (
                "--isl 99999999999",
                "invalid value '99999999999' for '--isl <TOKENS>': is too large; no such value goes above 4294967295",
            ),
            (
                "--header nonsense",
                "invalid value 'nonsense' for '--header <HEADER>': must read 'Name: value'",
            ),
            ("--osll 3", "unexpected argument '--osll' found; tip: a similar argument exists: '--osl'"),
        ] {
            assert_eq!(run_args(line).unwrap_err(), want);
        }
        assert!(run_args("--extra-body '[1]'").unwrap_err().contains("must be a JSON object"));
    }

    #[test]
    fn the_interactive_mode_is_refused_with_the_way_out() {
        assert!(run_args("-i --client --cmd 'rate 10'").unwrap_err().contains("not in this version"));
    }
}
