//! What a run is asked to do: target, workload, load. benchctl makes a [`Plan`] from its arguments, the
//! engine turns it into a prepared run. Values only; every bound is checked in one place, [`Plan::validate`].

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Average input tokens when none are given.
pub const DEFAULT_ISL: u32 = 1000;
/// Output tokens when none are given.
pub const DEFAULT_OSL: u32 = 100;
/// Content events before the first-chunk latency is taken, when not given.
pub const DEFAULT_FIRST_CHUNK_THRESHOLD: u32 = 16;
/// Tokens in a block of the server's prefix cache, when not given (vLLM's and SGLang's usual size on GPUs).
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
/// Seconds after which a request counts as timed out, when not given.
pub const DEFAULT_REQUEST_TIMEOUT_S: f64 = 300.0;
/// Seconds that what is in flight at the end is waited for, when not given.
pub const DEFAULT_DRAIN_TIMEOUT_S: f64 = 60.0;
/// Requests in flight above which an open loop refuses slots, when not given.
pub const DEFAULT_MAX_IN_FLIGHT: u32 = 10_000;
/// The `metrics_url` that switches the server's metrics off.
pub const METRICS_OFF: &str = "off";
/// Completions from which on an error rate is held against its limit: fewer say little about a rate.
pub const ERROR_RATE_FROM: u64 = 20;
/// Longest prompt or reply, in tokens, that a plan may ask for.
pub const MAX_TOKENS: u32 = 10_000_000;
/// Most turns that a session may have.
pub const MAX_TURNS: u32 = 10_000;
/// Most sessions that a closed loop may keep active.
pub const MAX_CONCURRENCY: u32 = 1_000_000;
/// Highest rate of an open loop, in slots a second.
pub const MAX_RATE_PER_S: f64 = 1_000_000.0;
/// Longest duration that any time field may hold, in seconds (about a year).
pub const MAX_SECONDS: f64 = 32_000_000.0;

/// All that a run needs; secrets are not part of it (see [`crate::wire::Secrets`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The server under test.
    pub target: Target,
    /// The conversations.
    pub workload: Workload,
    /// How many of them, and when.
    pub load: Load,
    /// Seed of prompts and arrivals; absent: a fresh random one, which the report shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Threads that make prompts; absent: one for each two cores, at least one. No effect on what is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_workers: Option<u32>,
    /// Failures above which the run is stopped; absent: no such limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_errors: Option<u64>,
    /// Failures / completions, 0 to 1, above which the run is stopped, from [`ERROR_RATE_FROM`] completions on;
    /// absent: no such limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_error_rate: Option<f64>,
    /// Put the gaps between content events, and the tokens of each, into every record line.
    #[serde(default)]
    pub save_events: bool,
}

/// The server under test and how to reach it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Base URL, with or without `/v1`; never with user info.
    pub url: String,
    /// Model name as the server knows it; absent: the only one that it lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// `builtin`, `server`, a path or a Hugging Face name; absent: the model's name, then `server`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// Extra request headers, name and value; none of them secret.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<(String, String)>,
    /// Fields merged into every request body, over our own.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra_body: Map<String, Value>,
    /// HTTP proxy URL; absent: none, whatever the environment says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy: Option<String>,
    /// PEM file of a certificate authority to trust beside the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_cert: Option<String>,
    /// Accept any TLS certificate.
    #[serde(default)]
    pub insecure: bool,
    /// Seconds from sent after which a request is a `timeout`.
    #[serde(default = "default_request_timeout_s")]
    pub request_timeout_s: f64,
    /// Seconds to wait for a server that is not there yet, or still loading; 0: do not wait.
    #[serde(default)]
    pub ready_timeout_s: f64,
    /// Where the server's own metrics are, in Prometheus' text format; [`METRICS_OFF`]: ask for none; absent:
    /// `/metrics` beside the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics_url: Option<String>,
}

/// The shape of the conversations, in the user's terms; the solver derives the rest ([`crate::spec::Spec`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Average input tokens over all turns, the chat template included; at least 1.
    pub isl: u32,
    /// Output tokens of each turn; at least 1.
    pub osl: u32,
    /// Cached tokens / prompt tokens, token-weighted, 0 to 1; absent: what the history alone gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_rate: Option<f64>,
    /// Turns of a session; at least 1.
    pub num_turns: u32,
    /// Share of the system prompt that all sessions have in common, 0 to 1; absent: 0, raised when 0 is infeasible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_system_prompt_ratio: Option<f64>,
    /// Seconds between an answer and the session's next turn.
    #[serde(default)]
    pub think_time_s: f64,
    /// Content events before the first-chunk latency is taken; at least 1.
    #[serde(default = "default_first_chunk_threshold")]
    pub first_chunk_threshold: u32,
    /// Tokens in a block of the server's prefix cache, for the by-blocks figures; at least 1.
    #[serde(default = "default_block_size")]
    pub block_size: u32,
}

impl Default for Workload {
    fn default() -> Self {
        Workload {
            isl: DEFAULT_ISL,
            osl: DEFAULT_OSL,
            hit_rate: None,
            num_turns: 1,
            shared_system_prompt_ratio: None,
            think_time_s: 0.0,
            first_chunk_threshold: DEFAULT_FIRST_CHUNK_THRESHOLD,
            block_size: DEFAULT_BLOCK_SIZE,
        }
    }
}

/// How requests are brought to the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "mode", rename_all = "snake_case", deny_unknown_fields)]
pub enum Load {
    /// A fixed number of active sessions.
    Closed {
        /// Active sessions.
        concurrency: u32,
        /// Sessions to run after the first generation (the first `concurrency` ones, which are warm-up).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        num_sessions: Option<u64>,
        /// Seconds, warm-up included, after which no turn starts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        duration_s: Option<f64>,
        /// Requests of sessions after the first generation, after which no turn starts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        num_requests: Option<u64>,
        /// Seconds between the starts of the first sessions; absent: think time / concurrency.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ramp_interval_s: Option<f64>,
        /// Upper end of a uniform delay added between turns during warm-up, in seconds.
        #[serde(default)]
        warmup_jitter_max_s: f64,
        /// Seconds that what is in flight at the end is waited for.
        #[serde(default = "default_drain_timeout_s")]
        drain_timeout_s: f64,
    },
    /// Slots at a rate, whatever the server does.
    Open {
        /// Slots a second.
        request_rate_per_s: f64,
        /// Seconds in which slots fall due, warm-up included.
        duration_s: f64,
        /// Seconds at the start whose slots are warm-up; below `duration_s`.
        #[serde(default)]
        warm_up_s: f64,
        /// Spacing of the slots.
        #[serde(default)]
        arrival: Arrival,
        /// Requests in flight above which a slot waits; absent: no such cap.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_concurrency: Option<u32>,
        /// Requests in flight above which a slot is refused.
        #[serde(default = "default_max_in_flight")]
        max_in_flight: u32,
        /// Seconds that what is in flight at the end is waited for.
        #[serde(default = "default_drain_timeout_s")]
        drain_timeout_s: f64,
    },
}

/// How the slots of an open loop are spaced; the mean is always 1 / rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Arrival {
    /// Equal gaps.
    #[default]
    Constant,
    /// Exponential gaps.
    Poisson,
    /// Gamma gaps of shape `burstiness`: 1 is Poisson, below 1 burstier, above 1 more even (vLLM's meaning).
    Gamma {
        /// Shape of the gamma distribution, above 0.
        burstiness: f64,
    },
}

fn default_request_timeout_s() -> f64 {
    DEFAULT_REQUEST_TIMEOUT_S
}
fn default_first_chunk_threshold() -> u32 {
    DEFAULT_FIRST_CHUNK_THRESHOLD
}
fn default_block_size() -> u32 {
    DEFAULT_BLOCK_SIZE
}
fn default_drain_timeout_s() -> f64 {
    DEFAULT_DRAIN_TIMEOUT_S
}
fn default_max_in_flight() -> u32 {
    DEFAULT_MAX_IN_FLIGHT
}

impl Plan {
    /// Checks every bound that needs no server; the sentence names the field, the bound and the value.
    pub fn validate(&self) -> Result<(), String> {
        self.target.validate()?;
        self.workload.validate()?;
        self.load.validate()?;
        if let Some(rate) = self.max_error_rate {
            within("max_error_rate", rate, 0.0, 1.0)?;
        }
        match self.num_workers {
            Some(n) => whole("num_workers", u64::from(n), 1, 1024),
            None => Ok(()),
        }
    }
}

/// Fields of a request's body that the plan sets, and that nothing may set otherwise.
const OUR_FIELDS: [&str; 5] = ["model", "messages", "max_tokens", "max_completion_tokens", "stream"];

/// Headers that belong to HTTP's framing.
fn is_framing(name: &str) -> bool {
    ["content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer"]
        .iter()
        .any(|framing| name.eq_ignore_ascii_case(framing))
}

impl Target {
    /// Checks what can be checked without asking the server.
    pub fn validate(&self) -> Result<(), String> {
        let has_scheme = |scheme: &str| {
            self.url.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
        };
        let scheme_ok = has_scheme("http://") || has_scheme("https://");
        if !scheme_ok {
            return Err(format!(
                "the URL must start with http:// or https://, got {:?}; for example http://localhost:8000",
                self.url
            ));
        }
        if let Some(url) = self.metrics_url.as_deref().filter(|url| *url != METRICS_OFF) {
            let Some((_, rest)) = url.split_once("://").filter(|(s, _)| ["http", "https"].contains(s)) else {
                return Err(format!(
                    "metrics_url must start with http:// or https://, or be {METRICS_OFF}, got {url:?}"
                ));
            };
            if rest.split(['/', '?', '#']).next().is_some_and(|host| host.contains('@')) {
                return Err("metrics_url must not hold user info".to_owned());
            }
        }
        if self.url.contains(['?', '#']) {
            return Err(format!("the URL must be a base without a query or fragment, got {:?}", self.url));
        }
        if let Some(name) = self.headers.iter().map(|(name, _)| name).find(|name| is_framing(name)) {
            return Err(format!(
                "the header {name:?} describes the connection and is not for a request to set"
            ));
        }
        let ours = |name: &&String| OUR_FIELDS.contains(&name.as_str());
        if let Some(name) = self.extra_body.keys().find(ours) {
            return Err(format!(
                "the extra body must leave {name:?} alone: the plan sets it (model, output tokens, messages, stream)"
            ));
        }
        seconds_above_zero("request_timeout_s", self.request_timeout_s)?;
        seconds("ready_timeout_s", self.ready_timeout_s)
    }
}

impl Workload {
    /// Checks the bounds; whether the combination is feasible is the solver's answer.
    pub fn validate(&self) -> Result<(), String> {
        whole("isl", u64::from(self.isl), 1, u64::from(MAX_TOKENS))?;
        whole("osl", u64::from(self.osl), 1, u64::from(MAX_TOKENS))?;
        whole("num_turns", u64::from(self.num_turns), 1, u64::from(MAX_TURNS))?;
        whole("first_chunk_threshold", u64::from(self.first_chunk_threshold), 1, u64::from(MAX_TOKENS))?;
        whole("block_size", u64::from(self.block_size), 1, 65_536)?;
        if let Some(h) = self.hit_rate {
            within("hit_rate", h, 0.0, 1.0)?;
        }
        if let Some(f) = self.shared_system_prompt_ratio {
            within("shared_system_prompt_ratio", f, 0.0, 1.0)?;
        }
        seconds("think_time_s", self.think_time_s)
    }
}

impl Load {
    /// Checks the bounds of the load.
    pub fn validate(&self) -> Result<(), String> {
        match self {
            Load::Closed {
                concurrency,
                num_sessions,
                duration_s,
                num_requests,
                ramp_interval_s,
                warmup_jitter_max_s,
                drain_timeout_s,
            } => {
                whole("concurrency", u64::from(*concurrency), 1, u64::from(MAX_CONCURRENCY))?;
                if let Some(n) = num_sessions {
                    whole("num_sessions", *n, 1, 1_000_000_000)?;
                }
                if let Some(n) = num_requests {
                    whole("num_requests", *n, 1, 1_000_000_000)?;
                }
                if let Some(d) = duration_s {
                    seconds_above_zero("duration_s", *d)?;
                }
                if num_sessions.is_none() && duration_s.is_none() && num_requests.is_none() {
                    return Err(
                        "a closed loop needs an end: give --num-sessions, --duration or --num-requests"
                            .to_owned(),
                    );
                }
                if let Some(r) = ramp_interval_s {
                    seconds("ramp_interval_s", *r)?;
                }
                seconds("warmup_jitter_max_s", *warmup_jitter_max_s)?;
                seconds("drain_timeout_s", *drain_timeout_s)
            }
            Load::Open {
                request_rate_per_s,
                duration_s,
                warm_up_s,
                arrival,
                max_concurrency,
                max_in_flight,
                drain_timeout_s,
            } => {
                above_zero("request_rate_per_s", *request_rate_per_s, MAX_RATE_PER_S)?;
                seconds_above_zero("duration_s", *duration_s)?;
                seconds("warm_up_s", *warm_up_s)?;
                if warm_up_s >= duration_s {
                    return Err(format!(
                        "the warm-up must be shorter than the duration, which includes it: got {warm_up_s} s of \
                         {duration_s} s; use a warm-up below {duration_s} or a longer --duration"
                    ));
                }
                if request_rate_per_s * duration_s < 1.0 {
                    return Err(format!(
                        "{request_rate_per_s} requests a second for {duration_s} s is less than one request; use a \
                         --duration of at least {:.3}",
                        1.0 / request_rate_per_s
                    ));
                }
                if let Arrival::Gamma { burstiness } = arrival {
                    above_zero("burstiness", *burstiness, 1_000_000.0)?;
                }
                if let Some(c) = max_concurrency {
                    whole("max_concurrency", u64::from(*c), 1, u64::from(MAX_CONCURRENCY))?;
                }
                whole("max_in_flight", u64::from(*max_in_flight), 1, u64::from(MAX_CONCURRENCY))?;
                seconds("drain_timeout_s", *drain_timeout_s)
            }
        }
    }
}

fn whole(name: &str, got: u64, low: u64, high: u64) -> Result<(), String> {
    if (low..=high).contains(&got) {
        Ok(())
    } else {
        Err(format!("{name} must be from {low} to {high}, got {got}"))
    }
}

fn within(name: &str, got: f64, low: f64, high: f64) -> Result<(), String> {
    // A NaN is within nothing.
    if (low..=high).contains(&got) {
        Ok(())
    } else {
        Err(format!("{name} must be from {low} to {high}, got {got}"))
    }
}

fn seconds(name: &str, got: f64) -> Result<(), String> {
    within(name, got, 0.0, MAX_SECONDS)
}

fn seconds_above_zero(name: &str, got: f64) -> Result<(), String> {
    above_zero(name, got, MAX_SECONDS)
}

fn above_zero(name: &str, got: f64, high: f64) -> Result<(), String> {
    if got > 0.0 && got <= high {
        Ok(())
    } else {
        Err(format!("{name} must be above 0 and at most {high}, got {got}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> Load {
        Load::Open {
            request_rate_per_s: 10.0,
            duration_s: 10.0,
            warm_up_s: 0.0,
            arrival: Arrival::Constant,
            max_concurrency: None,
            max_in_flight: DEFAULT_MAX_IN_FLIGHT,
            drain_timeout_s: 60.0,
        }
    }

    #[test]
    fn a_value_that_is_not_a_number_is_within_no_bound() {
        for bad in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            let mut load = open();
            let Load::Open { request_rate_per_s, .. } = &mut load else { unreachable!() };
            *request_rate_per_s = bad;
            assert!(load.validate().is_err(), "{bad} was taken");
        }
        let workload = Workload { hit_rate: Some(f64::NAN), ..Workload::default() };
        assert!(workload.validate().unwrap_err().contains("hit_rate must be from 0 to 1"));
    }

    #[test]
    fn a_target_says_nothing_that_is_the_plans_or_the_connections() {
        let refusal = |change: &str| {
            let text = format!(r#"{{"url":"http://h"{change}}}"#);
            serde_json::from_str::<Target>(&text).unwrap().validate().unwrap_err()
        };
        assert!(refusal(r#","headers":[["Content-Length","3"]]"#).contains("Content-Length"));
        assert!(refusal(r#","extra_body":{"max_tokens":3}"#).contains("max_tokens"));
        let target =
            |url: &str| serde_json::from_str::<Target>(&format!(r#"{{"url":"{url}"}}"#)).unwrap().validate();
        assert!(target("http://h/v1?key=1").unwrap_err().contains("query"));
        assert!(target("HTTP://h").is_ok() && target("https://h/x/v1/").is_ok());
        assert!(target("ftp://h").is_err() && target("h").is_err());
    }

    #[test]
    fn warm_up_must_end_before_the_run_does() {
        let mut load = open();
        let Load::Open { warm_up_s, .. } = &mut load else { unreachable!() };
        *warm_up_s = 10.0;
        assert!(load.validate().unwrap_err().contains("shorter than the duration"));
    }

    #[test]
    fn a_closed_loop_without_an_end_is_refused() {
        let load: Load = serde_json::from_str(r#"{"mode":"closed","concurrency":4}"#).unwrap();
        assert!(load.validate().unwrap_err().contains("--num-sessions"));
    }

    #[test]
    fn the_metrics_url_is_one_or_off() {
        let target = |metrics_url: &str| -> Target {
            serde_json::from_value(serde_json::json!({"url": "http://h", "metrics_url": metrics_url}))
                .unwrap()
        };
        for good in ["off", "http://h:9/metrics", "https://h/x?a=b@c"] {
            assert_eq!(target(good).validate(), Ok(()));
        }
        for bad in ["", "on", "h/metrics", "ftp://h", "http://me:secret@h/metrics"] {
            let refused = target(bad).validate().unwrap_err();
            assert!(refused.starts_with("metrics_url must") && !refused.contains("secret"), "{refused}");
        }
    }

    #[test]
    fn an_unknown_field_is_refused() {
        assert!(
            serde_json::from_str::<Workload>(r#"{"isl":1,"osl":1,"num_turns":1,"hitrate":0.5}"#).is_err()
        );
    }
}
