//! What goes wrong on purpose: which faults there are, and which of them strikes a request. Pure.
//!
//! Whether a request is struck is drawn from the seed and the digest of its messages, so that the same
//! messages meet the same fault, whenever and however often they come. `stream` makes it happen.

mod stream;

pub(crate) use stream::{change, with_length_off};

use anyhow::{Result, ensure};
use rand::RngExt;
use serde::{Serialize, Serializer};
use serde_json::json;

use crate::http::Response;
use crate::options::FaultOptions;
use crate::replies::rng;

/// Sessions of the load generator's preparations, which are spared unless told otherwise.
const PREPARATIONS: [&str; 3] = ["probe", "calibration", "smoke"];

/// A fault, as it is named on the command line, and the share of requests that it strikes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Strike {
    /// With its argument, as given
    pub(crate) name: String,
    pub(crate) fault: Fault,
    pub(crate) share: f64,
}

/// What can go wrong with one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The connection is given up
    Lost(Loss, Place),
    /// An error status
    Status(u16, Body),
    /// The body ends in order after so many content events, without finish reason and `[DONE]`
    End(u32),
    /// An `error` object after so many content events
    Error(u32),
    /// An event that is not JSON after so many content events
    Garbage(u32),
    /// A chunk whose size is no number after so many content events
    BadChunk(u32),
    /// A JSON body whose content-length is off by so many bytes
    Json(i64),
    /// A stream with a content-length that is off by so many bytes
    Length(i64),
    /// No content, no tokens
    Empty,
    NoDone,
    NoFinish,
    /// `[DONE]` comes so many ms after all else
    LateDone(u32),
    /// Usage in every chunk
    UsageEach,
    /// So many content events are reasoning
    Reasoning(u32),
    /// Content is the arguments of a tool call
    Tools,
    /// Chunks of a few bytes
    Cut,
    /// One byte a write
    Drip,
    /// Lines end so
    LineEnd(&'static str),
    /// Comments, ids, event names, data over several lines, a byte order mark
    Fields,
    Gzip,
    /// Everything at once, when the last token is due
    Burst,
    /// The first content event is so many MB long
    Huge(u32),
    /// So many headers
    HeaderFlood(u32),
}

/// How a connection is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// RST
    Reset,
    /// FIN of both directions
    Close,
    /// FIN of ours alone, until the client closes
    HalfClose,
    /// Nothing, until the client closes
    Hang,
}

/// Where in the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    BeforeHead,
    InHead,
    /// After the head and so many content events
    Events(u32),
}

/// The body of an error status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Body {
    Json,
    Html,
    Empty,
}

impl Strike {
    /// Reads `NAME[:ARG]=SHARE`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (name, share) = text.rsplit_once('=').ok_or("must be NAME=SHARE or NAME:ARG=SHARE")?;
        let share = match share.parse::<f64>() {
            Ok(share) if (0.0..=1.0).contains(&share) => share,
            _ => return Err(format!("the share must lie between 0 and 1, got {share}")),
        };
        Ok(Self { name: name.to_owned(), fault: Fault::parse(name)?, share })
    }
}

impl Serialize for Strike {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}={}", self.name, self.share))
    }
}

impl Fault {
    fn parse(name: &str) -> Result<Self, String> {
        let (kind, arg) = name.split_once(':').map_or((name, None), |(kind, arg)| (kind, Some(arg)));
        let whole = |default: u32| match arg {
            None => Ok(default),
            Some(arg) => arg.parse::<u32>().map_err(|_| format!("{kind} takes a whole number, got {arg}")),
        };
        let signed = || match arg {
            None => Ok(0),
            Some(arg) => {
                arg.parse::<i32>().map(i64::from).map_err(|_| format!("{kind} takes bytes, got {arg}"))
            }
        };
        let lost = |loss| match arg {
            None | Some("before-head") => Ok(Self::Lost(loss, Place::BeforeHead)),
            Some("in-head") => Ok(Self::Lost(loss, Place::InHead)),
            Some("after-head") => Ok(Self::Lost(loss, Place::Events(0))),
            Some(arg) => match arg.parse() {
                Ok(events) => Ok(Self::Lost(loss, Place::Events(events))),
                Err(_) => Err(format!(
                    "{kind} takes before-head, in-head, after-head or a number of events, got {arg}"
                )),
            },
        };
        let fault = match kind {
            "reset" => lost(Loss::Reset)?,
            "close" => lost(Loss::Close)?,
            "half-close" => lost(Loss::HalfClose)?,
            "hang" => lost(Loss::Hang)?,
            "status" => status(arg.unwrap_or("500"))?,
            "end" => Self::End(whole(0)?),
            "error" => Self::Error(whole(0)?),
            "garbage" => Self::Garbage(whole(0)?),
            "bad-chunk" => Self::BadChunk(whole(0)?),
            "json" => Self::Json(signed()?),
            "length" => Self::Length(signed()?),
            "late-done" => Self::LateDone(whole(100)?),
            "reasoning" => Self::Reasoning(whole(1)?),
            "huge" => Self::Huge(whole(10)?.clamp(1, 1024)),
            "header-flood" => Self::HeaderFlood(whole(200)?.min(100_000)),
            "empty" => Self::Empty,
            "no-done" => Self::NoDone,
            "no-finish" => Self::NoFinish,
            "usage-each" => Self::UsageEach,
            "tools" => Self::Tools,
            "cut" => Self::Cut,
            "drip" => Self::Drip,
            "crlf" => Self::LineEnd("\r\n"),
            "cr" => Self::LineEnd("\r"),
            "fields" => Self::Fields,
            "gzip" => Self::Gzip,
            "burst" => Self::Burst,
            _ => return Err(format!("there is no fault {kind}; --help lists them")),
        };
        Ok(fault)
    }

    /// Whether a client has the whole answer in spite of it.
    pub(crate) fn is_whole(self) -> bool {
        match self {
            Self::Lost(..)
            | Self::Status(..)
            | Self::End(_)
            | Self::Error(_)
            | Self::Garbage(_)
            | Self::BadChunk(_)
            | Self::Empty
            | Self::HeaderFlood(_) => false,
            Self::Json(off) => off == 0,
            Self::Length(off) => off >= 0,
            _ => true,
        }
    }

    /// Whether the connection ends with it.
    pub(crate) fn closes(self) -> bool {
        match self {
            Self::Lost(..) | Self::BadChunk(_) | Self::HeaderFlood(_) => true,
            Self::Json(off) | Self::Length(off) => off != 0,
            _ => false,
        }
    }

    /// Whether the head of a 200 goes out whole.
    pub(crate) fn sends_head(self) -> bool {
        !matches!(self, Self::Lost(_, Place::BeforeHead | Place::InHead))
    }

    /// The answer to a request that is not even begun.
    pub(crate) fn refusal(self) -> Option<Response> {
        let Self::Status(status, body) = self else { return None };
        let headers = if status == 429 { "retry-after: 1\r\n" } else { "" };
        let (content_type, body) = match body {
            Body::Json => {
                let error =
                    json!({"error": {"message": "a fault was asked for", "type": "Fault", "code": status}});
                ("application/json", error.to_string())
            }
            Body::Html => (
                "text/html",
                format!(
                    "<html><head><title>{status}</title></head><body>a fault was asked for</body></html>\n"
                ),
            ),
            Body::Empty => ("text/plain", String::new()),
        };
        Some(Response { status, content_type, headers, body: body.into_bytes() })
    }
}

fn status(arg: &str) -> Result<Fault, String> {
    let (code, body) = arg.split_once(':').unwrap_or((arg, "json"));
    let body = match body {
        "json" => Body::Json,
        "html" => Body::Html,
        "empty" => Body::Empty,
        _ => return Err(format!("the body of a status is json, html or empty, got {body}")),
    };
    match code.parse() {
        Ok(code @ 400..=599) => Ok(Fault::Status(code, body)),
        _ => Err(format!("a status lies between 400 and 599, got {code}")),
    }
}

/// All faults that were asked for.
#[derive(Debug)]
pub(crate) struct Faults {
    seed: u64,
    options: FaultOptions,
}

impl Faults {
    /// Refuses shares that add up to more than all requests.
    pub(crate) fn new(seed: u64, options: FaultOptions) -> Result<Self> {
        let sum: f64 = options.fault.iter().map(|strike| strike.share).sum();
        ensure!(sum <= 1.0 + 1e-9, "the shares of all faults may add up to 1, got {sum}");
        Ok(Self { seed, options })
    }

    /// The fault that strikes the request with this digest.
    pub(crate) fn strike(&self, digest: &[u8; 32], session: Option<&str>) -> Option<&Strike> {
        let is_preparation = session.is_some_and(|session| PREPARATIONS.contains(&session));
        if self.options.fault.is_empty() || (is_preparation && !self.options.fault_all) {
            return None;
        }
        let mut left: f64 = rng(self.seed, "fault", digest).random();
        self.options.fault.iter().find(|strike| {
            left -= strike.share;
            left < 0.0
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn faults(args: &[&str]) -> Result<Faults> {
        Faults::new(7, FaultOptions::try_parse_from([&["faults"], args].concat())?)
    }

    fn digest(n: u16) -> [u8; 32] {
        let mut digest = [0; 32];
        digest[..2].copy_from_slice(&n.to_le_bytes());
        digest
    }

    #[test]
    fn each_fault_strikes_its_share_and_the_same_messages_again() {
        let faults = faults(&["--fault", "reset:3=0.1", "--fault", "gzip=0.3"]).unwrap();
        let mut counts = [0, 0, 0];
        for n in 0..4000 {
            let strike = faults.strike(&digest(n), None);
            assert_eq!(strike, faults.strike(&digest(n), Some("other")));
            counts[strike.map_or(2, |strike| usize::from(strike.name == "gzip"))] += 1;
        }
        assert!((330..470).contains(&counts[0]) && (1100..1300).contains(&counts[1]), "{counts:?}");
    }

    #[test]
    fn preparations_are_spared_unless_told_otherwise() {
        let all = ["--fault", "empty=1"];
        for session in PREPARATIONS {
            assert_eq!(faults(&all).unwrap().strike(&digest(1), Some(session)), None);
            let strict = faults(&[&all[..], &["--fault-all"]].concat()).unwrap();
            assert!(strict.strike(&digest(1), Some(session)).is_some());
        }
        assert!(faults(&all).unwrap().strike(&digest(1), Some("s-1")).is_some());
    }

    #[test]
    fn what_is_no_fault_is_refused_and_says_why() {
        let refusal = |text: &str| Strike::parse(text).unwrap_err();
        assert!(refusal("reset").contains("NAME=SHARE"));
        assert!(refusal("reset=2").contains("between 0 and 1"));
        assert!(refusal("rest=0.5").contains("no fault rest"));
        assert!(refusal("reset:x=0.5").contains("before-head"));
        assert!(refusal("status:200=0.5").contains("between 400 and 599"));
        assert!(refusal("status:500:xml=0.5").contains("json, html or empty"));
        assert!(faults(&["--fault", "cr=0.7", "--fault", "crlf=0.4"]).is_err());
    }
}
