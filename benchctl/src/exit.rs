//! How benchctl ends: the exit codes, the sentence that goes with each failure, and the one function from a
//! run's outcome to its code.

use proto::report::{ReasonKind, Report, Trust};
use proto::socket::CallError;
use proto::wire::ErrorCode;

/// What the process tells its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// A fault of ours.
    Internal = 1,
    /// Wrong arguments, a value out of its bounds, an infeasible workload.
    Usage = 2,
    /// The numbers are suspect, and `--strict` was given.
    Suspect = 3,
    /// No request succeeded, or more failed than was allowed.
    TooManyFailed = 5,
    /// The server cannot be reached.
    Unreachable = 6,
    /// The server refused the key.
    Unauthorized = 7,
    /// The server does not know the model.
    UnknownModel = 8,
    /// No tokenizer.
    Tokenizer = 9,
    /// The output file cannot be written, or exists.
    OutputFile = 10,
    /// The daemon refused the command.
    Refused = 11,
    /// SIGHUP.
    HungUp = 129,
    /// SIGINT.
    Interrupted = 130,
    /// SIGTERM.
    Terminated = 143,
}

/// A failure that a person reads: one sentence, and the code that it ends with.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Trouble {
    /// The code.
    pub exit: Exit,
    /// The sentence, without `benchctl: `.
    pub message: String,
}

impl Trouble {
    /// A failure with its sentence.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Trouble { exit, message: message.into() }
    }

    /// Wrong arguments.
    pub fn usage(message: impl Into<String>) -> Self {
        Trouble::new(Exit::Usage, message)
    }

    /// A fault of ours or of the machine.
    pub fn internal(message: impl Into<String>) -> Self {
        Trouble::new(Exit::Internal, message)
    }
}

impl From<CallError> for Trouble {
    fn from(error: CallError) -> Self {
        let exit = match &error {
            CallError::Refused(failure) => Exit::of_code(failure.code),
            CallError::Io(_) | CallError::Unreadable { .. } => Exit::Internal,
        };
        Trouble::new(exit, error.to_string())
    }
}

/// How strictly a suspect verdict is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Strict {
    /// Any reason.
    Any,
    /// Only reasons that the load generator or its machine gave.
    Client,
}

impl Exit {
    /// The code of a signal that ends us.
    pub fn of_signal(signal: i32) -> Exit {
        match signal {
            signal_hook::consts::SIGHUP => Exit::HungUp,
            signal_hook::consts::SIGTERM => Exit::Terminated,
            _ => Exit::Interrupted,
        }
    }

    /// The code of a refusal by the daemon.
    pub fn of_code(code: ErrorCode) -> Exit {
        match code {
            ErrorCode::BadValue | ErrorCode::Infeasible => Exit::Usage,
            ErrorCode::Busy | ErrorCode::NotRunning | ErrorCode::Stopped => Exit::Refused,
            ErrorCode::Unreachable => Exit::Unreachable,
            ErrorCode::Unauthorized => Exit::Unauthorized,
            ErrorCode::UnknownModel => Exit::UnknownModel,
            // The first requests failed, and with them all that would have followed.
            ErrorCode::Server => Exit::TooManyFailed,
            ErrorCode::Tokenizer => Exit::Tokenizer,
            // We only send what we believe to be requests.
            ErrorCode::BadRequest | ErrorCode::Internal => Exit::Internal,
        }
    }

    /// The code of a run that gave a report. What was lost comes first, then why the run ended, then what it was
    /// worth.
    pub fn of_run(report: &Report, save_failed: bool, signal: Option<i32>, strict: Option<Strict>) -> Exit {
        if save_failed {
            return Exit::OutputFile;
        }
        if let Some(signal) = signal {
            return Exit::of_signal(signal);
        }
        if successes(report) == 0 || report.benchmark.error_limit_reached {
            return Exit::TooManyFailed;
        }
        // Nobody here stopped it.
        if report.benchmark.is_partial {
            return Exit::Internal;
        }
        let counts = |kind: ReasonKind| match strict {
            None => false,
            Some(Strict::Any) => true,
            Some(Strict::Client) => kind == ReasonKind::Client,
        };
        let suspect = report.verdict.reasons.iter().any(|reason| counts(reason.kind));
        // A verdict without reasons is still a verdict.
        let unexplained = report.verdict.trust == Trust::Suspect && report.verdict.reasons.is_empty();
        if suspect || (unexplained && strict == Some(Strict::Any)) { Exit::Suspect } else { Exit::Done }
    }

    /// The number.
    pub fn code(self) -> u8 {
        self as u8
    }
}

/// Requests that came to a whole answer, in any phase.
pub fn successes(report: &Report) -> u64 {
    let b = &report.benchmark;
    b.total_requests
        .saturating_sub(b.failed_requests)
        .saturating_sub(b.refused_requests)
        .saturating_sub(b.aborted_requests)
}

/// Why a run ends with [`Exit::TooManyFailed`], as a sentence; `None` when it does not.
pub fn why_failed(report: &Report) -> Option<String> {
    let is_at_limit = report.benchmark.error_limit_reached;
    if successes(report) > 0 && !is_at_limit {
        return None;
    }
    let b = &report.benchmark;
    let Some(kind) = report.failures.kinds.first() else {
        return Some(match b.total_requests {
            0 => "no request was sent".to_owned(),
            n => format!(
                "none of {n} requests succeeded: {} refused, {} aborted",
                b.refused_requests, b.aborted_requests
            ),
        });
    };
    let status = kind.http_status.map(|code| format!(" {code}")).unwrap_or_default();
    let sample = kind.samples.first().map(|text| format!(": {text}")).unwrap_or_default();
    let what = match is_at_limit {
        true => "the run was stopped because too many requests failed",
        false => "every request failed",
    };
    Some(format!(
        "{what} ({} of {}), most often with {}{status}{sample}",
        report.failures.total, b.total_requests, kind.outcome
    ))
}

#[cfg(test)]
mod tests {
    use proto::report::{Reason, Verdict};

    use super::*;
    use crate::sample;

    fn suspect(kind: ReasonKind) -> Verdict {
        let reason = Reason { kind, code: "x".into(), text: "x".into() };
        Verdict { trust: Trust::Suspect, reasons: vec![reason] }
    }

    #[test]
    fn a_run_ends_with_the_code_of_what_matters_most() {
        let good = sample::report();
        let mut failed = sample::report();
        failed.benchmark.failed_requests = failed.benchmark.total_requests;
        let mut at_limit = sample::report();
        at_limit.benchmark.error_limit_reached = true;
        let mut cut = sample::report();
        cut.benchmark.is_partial = true;
        let mut late = sample::report();
        late.verdict = suspect(ReasonKind::Client);
        let mut slow = sample::report();
        slow.verdict = suspect(ReasonKind::Server);

        let sigint = Some(signal_hook::consts::SIGINT);
        let sigterm = Some(signal_hook::consts::SIGTERM);
        for (report, save_failed, signal, strict, want) in [
            (&good, false, None, None, 0),
            (&good, false, None, Some(Strict::Any), 0),
            (&late, false, None, None, 0),
            (&late, false, None, Some(Strict::Any), 3),
            (&late, false, None, Some(Strict::Client), 3),
            (&slow, false, None, Some(Strict::Any), 3),
            (&slow, false, None, Some(Strict::Client), 0),
            (&failed, false, None, None, 5),
            (&at_limit, false, None, None, 5),
            (&cut, false, None, None, 1),
            (&cut, false, sigterm, None, 143),
            (&at_limit, false, sigint, None, 130),
            (&failed, false, sigint, None, 130),
            (&good, false, sigterm, Some(Strict::Any), 143),
            (&good, true, sigint, None, 10),
        ] {
            assert_eq!(Exit::of_run(report, save_failed, signal, strict).code(), want);
        }
    }

    #[test]
    fn a_run_without_success_says_why() {
        let mut report = sample::report();
        assert_eq!(why_failed(&report), None);
        report.benchmark.failed_requests = report.benchmark.total_requests;
        let why = why_failed(&report).unwrap();
        assert!(why.contains("http_status 500: the engine died"), "{why}");
        report.benchmark.failed_requests = 3;
        assert_eq!(why_failed(&report), None);
        report.benchmark.error_limit_reached = true;
        let why = why_failed(&report).unwrap();
        assert!(why.starts_with("the run was stopped because too many requests failed"), "{why}");
        report.benchmark.failed_requests = report.benchmark.total_requests;
        report.failures = Default::default();
        report.benchmark.total_requests = 0;
        assert_eq!(why_failed(&report).unwrap(), "no request was sent");
    }
}
