//! The command line: every knob of the simulated server, with its unit and its default.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use serde::Serialize;

use crate::faults::Strike;

/// A simulated OpenAI-compatible LLM server that keeps a log of what really happened.
///
/// The first line on stdout is {"url":…,"pid":…} once it listens. Times are kept to absolute
/// CLOCK_MONOTONIC instants; how late each write was is on /metrics, in the truth log and, at the end,
/// on stderr. The same seed and the same messages give the same reply, length and times.
#[derive(Debug, Clone, Parser, Serialize)]
// A later option overrides an earlier one, so that a caller can append to a common set.
#[command(version, args_override_self = true)]
pub(crate) struct Options {
    /// Address to listen on; port 0 takes any free port
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    pub(crate) listen: SocketAddr,
    /// Name of the one model that is served
    #[arg(long, value_name = "NAME", default_value = "sim")]
    pub(crate) model: String,
    /// Require `Authorization: Bearer K`; anything else gets 401
    #[arg(long, value_name = "K")]
    #[serde(skip)]
    pub(crate) api_key: Option<String>,
    /// A tokenizer.json, a folder that holds one, or `builtin`
    #[arg(long, value_name = "PATH", default_value = "builtin")]
    pub(crate) tokenizer: String,
    /// Seed of replies, lengths and times
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Stop when stdin reaches end-of-file (the parent died)
    #[arg(long)]
    pub(crate) lifeline: bool,
    /// Write what really happened to this file, as JSON lines
    #[arg(long, value_name = "FILE")]
    pub(crate) truth: Option<PathBuf>,
    /// Add to each truth line the instant of each content event's write
    #[arg(long, requires = "truth")]
    pub(crate) truth_writes: bool,

    #[command(flatten)]
    pub(crate) times: TimeOptions,
    #[command(flatten)]
    pub(crate) template: TemplateOptions,
    #[command(flatten)]
    pub(crate) cache: CacheOptions,
    #[command(flatten)]
    pub(crate) reply: ReplyOptions,
    #[command(flatten)]
    pub(crate) stream: StreamOptions,
    #[command(flatten)]
    pub(crate) limits: LimitOptions,
    #[command(flatten)]
    pub(crate) faults: FaultOptions,
}

/// When tokens come.
#[derive(Debug, Clone, Parser, Serialize)]
#[command(next_help_heading = "Times")]
pub(crate) struct TimeOptions {
    /// Time to first token without its prefill, in ms, from the instant the request has a slot
    /// (the median of a lognormal, else the mean)
    #[arg(long, value_name = "MS", default_value_t = 20.0, value_parser = not_negative)]
    pub(crate) ttft_ms: f64,
    /// Prefill time added for each prompt token that is not cached, in µs
    #[arg(long, value_name = "US", default_value_t = 10.0, value_parser = not_negative)]
    pub(crate) prefill_us_per_token: f64,
    /// Time between two tokens, in ms (the median of a lognormal, else the mean)
    #[arg(long, value_name = "MS", default_value_t = 5.0, value_parser = not_negative)]
    pub(crate) itl_ms: f64,
    /// How --ttft-ms varies between requests
    #[arg(long, value_enum, default_value_t = Shape::Fixed)]
    pub(crate) ttft_dist: Shape,
    /// Spread of --ttft-ms: share of the mean (normal), or sigma of the log (lognormal)
    #[arg(long, value_name = "S", default_value_t = 0.2, value_parser = not_negative)]
    pub(crate) ttft_sigma: f64,
    /// How --itl-ms varies between tokens
    #[arg(long, value_enum, default_value_t = Shape::Fixed)]
    pub(crate) itl_dist: Shape,
    /// Spread of --itl-ms: share of the mean (normal), or sigma of the log (lognormal)
    #[arg(long, value_name = "S", default_value_t = 0.2, value_parser = not_negative)]
    pub(crate) itl_sigma: f64,
    /// Multiply all times of a request by one lognormal factor of median 1 and this sigma of the log
    #[arg(long, value_name = "S", default_value_t = 0.0, value_parser = not_negative)]
    pub(crate) time_sigma: f64,
    /// Requests served at a time, the others wait in order; 0 = no limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) slots: usize,
    /// Answer 503 to everything for this long after the start, in s
    #[arg(long, value_name = "S", default_value_t = 0.0, value_parser = not_negative)]
    pub(crate) loading_s: f64,
    /// Write nothing for this long, again and again (--stall-every-s); what is due meanwhile comes at its end, in ms
    #[arg(long, value_name = "MS", default_value_t = 0.0, value_parser = not_negative)]
    pub(crate) stall_ms: f64,
    /// Time from the start of one stall to that of the next, in s; the first comes after this long
    #[arg(long, value_name = "S", default_value_t = 10.0, value_parser = not_negative)]
    pub(crate) stall_every_s: f64,
    /// Wait before each connection is accepted, one after another, in ms
    #[arg(long, value_name = "MS", default_value_t = 0.0, value_parser = not_negative)]
    pub(crate) accept_delay_ms: f64,
}

/// Tokens that the chat template adds.
#[derive(Debug, Clone, Copy, Parser, Serialize)]
#[command(next_help_heading = "Chat template")]
pub(crate) struct TemplateOptions {
    /// Tokens of the preamble, once a request
    #[arg(long = "template-request", value_name = "A", default_value_t = 3, value_parser = clap::value_parser!(u32).range(..=4096))]
    pub(crate) request: u32,
    /// Tokens of the header of each message
    #[arg(long = "template-message", value_name = "B", default_value_t = 4, value_parser = clap::value_parser!(u32).range(..=4096))]
    pub(crate) message: u32,
    /// Tokens of the reply's header. With C = B a history with its replies hits the prefix cache, as with
    /// real templates
    #[arg(long = "template-reply", value_name = "C", default_value_t = 4, value_parser = clap::value_parser!(u32).range(..=4096))]
    pub(crate) reply: u32,
}

/// The prefix cache.
#[derive(Debug, Clone, Copy, Parser, Serialize)]
#[command(next_help_heading = "Prefix cache")]
pub(crate) struct CacheOptions {
    /// Tokens in a block; only whole blocks are cached
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) block_size: u32,
    /// Blocks kept, least recently used out first; 0 = no cache
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(..=100_000_000))]
    pub(crate) cache_blocks: u32,
}

/// What is answered.
#[derive(Debug, Clone, Copy, Parser, Serialize)]
#[command(next_help_heading = "Replies")]
pub(crate) struct ReplyOptions {
    /// The text: words that tokenise back to the same ids, random ids that do not, or one fixed text
    #[arg(long = "reply", value_enum, default_value_t = Text::Words)]
    pub(crate) text: Text,
    /// Share of requests that end early, at a random length below max_tokens, whatever ignore_eos says
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub(crate) early_stop: f64,
    /// Reply length in tokens when the request names none
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) default_max_tokens: u32,
}

/// How it is streamed.
#[derive(Debug, Clone, Copy, Parser, Serialize)]
#[command(next_help_heading = "Stream")]
pub(crate) struct StreamOptions {
    /// Tokens in one content event; it is due when its first token is
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) tokens_per_event: u32,
    /// Send the role-only chunk at once instead of with the first token
    #[arg(long)]
    pub(crate) early_role: bool,
    /// Leave usage out of every answer
    #[arg(long)]
    pub(crate) no_usage: bool,
    /// Leave prompt_tokens_details out of usage
    #[arg(long)]
    pub(crate) no_cached_tokens: bool,
}

/// What is refused.
#[derive(Debug, Clone, Parser, Serialize)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitOptions {
    /// Most tokens of prompt and reply together; more gets 400
    #[arg(long, value_name = "TOKENS", default_value_t = 131_072)]
    pub(crate) max_model_len: u32,
    /// Answer 400 to requests that hold this parameter (repeatable), e.g. ignore_eos
    #[arg(long, value_name = "PARAM")]
    pub(crate) reject: Vec<String>,
}

/// The faults that can be asked for.
const FAULTS: &str = "\
Let a share of the streamed requests go wrong, by the digest of their messages (repeatable)

PLACE is before-head (default), in-head, after-head, or a number of content events.
K is a number of content events, 0 unless given.
The fault is in the request's line of the truth log.

reset:PLACE        the connection is reset
close:PLACE        the connection is closed
half-close:PLACE   the server ends its direction, and waits
hang:PLACE         nothing more comes
end:K              the body ends in order, without finish reason and [DONE]
status:CODE:BODY   an error status, 500 unless given; BODY is json, html or empty
error:K            an error object, then [DONE]
garbage:K          an event that is not JSON
bad-chunk:K        a chunk whose size is no number
empty              no content and no tokens
header-flood:N     N headers (200)
json:OFF           a JSON body; its content-length is off by OFF bytes (0)
length:OFF         a stream with a content-length that is off by OFF bytes (0)
no-done            a finish reason, but no [DONE]
no-finish          a [DONE], but no finish reason
late-done:MS       [DONE] comes late (100)
usage-each         usage in every chunk
reasoning:K        the first K content events are reasoning (1)
tools              content is a tool call
cut                events are cut into chunks of a few bytes
drip               one byte a write
crlf, cr           lines end otherwise
fields             comments, ids, event names, a byte order mark, data over several lines
gzip               compressed, although nobody asked
burst              the whole answer at once, with its last token
huge:MB            the first content event is MB long (10)";

/// What goes wrong.
#[derive(Debug, Clone, Parser, Serialize)]
#[command(next_help_heading = "Faults")]
pub(crate) struct FaultOptions {
    /// Let a share of the streamed requests go wrong, by the digest of their messages (repeatable)
    #[arg(long, value_name = "NAME[:ARG]=SHARE", value_parser = Strike::parse, long_help = FAULTS)]
    pub(crate) fault: Vec<Strike>,
    /// Do not spare the requests of the sessions `probe`, `calibration` and `smoke`
    #[arg(long)]
    pub(crate) fault_all: bool,
}

/// A distribution's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Shape {
    /// Always the same
    Fixed,
    /// Normal, cut at 0
    Normal,
    /// Lognormal
    Lognormal,
}

/// What replies are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Text {
    /// Words that are one token each and tokenise back to the generated ids
    Words,
    /// Random ids; their text tokenises to another length
    Random,
    /// The same words for every request
    Fixed,
}

fn not_negative(s: &str) -> Result<f64, String> {
    match s.parse::<f64>() {
        Ok(x) if x.is_finite() && x >= 0.0 => Ok(x),
        _ => Err("must be a number of 0 or more".into()),
    }
}

fn share(s: &str) -> Result<f64, String> {
    match s.parse::<f64>() {
        Ok(x) if (0.0..=1.0).contains(&x) => Ok(x),
        _ => Err("must lie between 0 and 1".into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn a_share_above_one_is_refused_with_its_bounds() {
        let error = Options::try_parse_from(["benchsim", "--early-stop", "1.5"]).unwrap_err().to_string();
        assert!(error.contains("between 0 and 1"), "{error}");
    }

    #[test]
    fn the_api_key_is_not_among_the_saved_options() {
        let options = Options::try_parse_from(["benchsim", "--api-key", "hunter2"]).unwrap();
        assert!(!serde_json::to_string(&options).unwrap().contains("hunter2"));
    }
}
