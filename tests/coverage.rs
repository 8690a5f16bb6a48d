//! Whether 95 % confidence intervals contain the truth in about 95 of 100 runs: runs drawn from processes whose mean
//! and percentiles are known, through the summary that makes every report.
//!
//! Part of the test suite with few runs; the full count takes some minutes:
//! `cargo test --release -p benchd --test coverage -- --full`

// Prints its table, and is no part of the program.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::process::ExitCode;

use benchd::engine::run_data::{RunData, ScheduleCounts};
use benchd::engine::seeded;
use benchd::engine::solve::solve;
use benchd::engine::summary::summarize;
use benchd::engine::telemetry::Telemetry;
use benchd::engine::watch::Watched;
use proto::gaps::Gaps;
use proto::interval::{Interval, Intervals};
use proto::metric::Metric;
use proto::plan::{Arrival, Load, Workload};
use proto::record::{Outcome, Phases, Record, RowContext};
use proto::report::{Config, Environment, Preparation};
use rand::RngExt;
use rand_distr::Exp1;

/// Mean time between requests, and what the queue's one server takes on average, in seconds: a load of 0.8.
const SPACING_S: f64 = 0.025;
const SERVICE_S: f64 = 0.020;

/// Where a run's TTFTs come from; both are exponential over all runs, and with it known.
#[derive(Clone, Copy, Debug)]
enum Process {
    /// Drawn one by one, mean 100 ms.
    Independent,
    /// Sojourn times of a stationary M/M/1 queue at load 0.8: exponential with the rate 1/service − 1/spacing.
    Queue,
}

impl Process {
    fn mean_ms(self) -> f64 {
        match self {
            Process::Independent => 100.0,
            Process::Queue => 1000.0 / (1.0 / SERVICE_S - 1.0 / SPACING_S),
        }
    }

    /// Due instant and TTFT of each request, in seconds.
    fn draw(self, requests: usize, run: u64) -> Vec<(f64, f64)> {
        let mut rng = seeded(run, "coverage");
        let mut exponential = |mean: f64| mean * rng.sample::<f64, _>(Exp1);
        let mut due_s = 0.0;
        let mut sojourn_s = exponential(self.mean_ms() / 1000.0);
        let mut drawn = Vec::with_capacity(requests);
        for _ in 0..requests {
            drawn.push((due_s, sojourn_s));
            match self {
                Process::Independent => {
                    due_s += SPACING_S;
                    sojourn_s = exponential(self.mean_ms() / 1000.0);
                }
                Process::Queue => {
                    let gap_s = exponential(SPACING_S);
                    due_s += gap_s;
                    sojourn_s = (sojourn_s - gap_s).max(0.0) + exponential(SERVICE_S);
                }
            }
        }
        drawn
    }
}

/// What is asked of the intervals at one length of run.
struct Case {
    process: Process,
    requests: usize,
    /// Runs of the quick version; 0 leaves it out.
    quick_runs: u64,
    /// Figures that must have an interval in nearly all runs, and the truth in it in 90 to 99 % of them.
    given: &'static [&'static str],
    /// Figures that must have none in nearly all runs, which are too short for it.
    not_given: &'static [&'static str],
}

const FIGURES: [&str; 5] = ["mean", "p50", "p90", "p95", "p99"];

const CASES: [Case; 7] = [
    Case {
        process: Process::Independent,
        requests: 100,
        quick_runs: 60,
        given: &["mean", "p50", "p90"],
        not_given: &["p99"],
    },
    Case { process: Process::Independent, requests: 1000, quick_runs: 40, given: &FIGURES, not_given: &[] },
    Case { process: Process::Independent, requests: 5000, quick_runs: 0, given: &FIGURES, not_given: &[] },
    Case {
        process: Process::Queue,
        requests: 1000,
        quick_runs: 40,
        given: &[],
        not_given: &["mean", "p90", "p95", "p99"],
    },
    Case {
        process: Process::Queue,
        requests: 5000,
        quick_runs: 40,
        given: &["mean", "p50", "p90"],
        not_given: &["p99"],
    },
    Case {
        process: Process::Queue,
        requests: 10_000,
        quick_runs: 0,
        given: &["mean", "p50", "p90", "p95"],
        not_given: &["p99"],
    },
    Case { process: Process::Queue, requests: 50_000, quick_runs: 0, given: &FIGURES, not_given: &[] },
];

/// Runs of each case in the full version: so many that chance moves a coverage by less than a point.
const FULL_RUNS: u64 = 1000;

/// How one figure's intervals did.
#[derive(Clone, Copy, Default)]
struct Tally {
    given: u64,
    too_high: u64,
    too_low: u64,
    /// Sum of widths over the truth.
    widths: f64,
}

impl Tally {
    fn add(&mut self, interval: Option<Interval>, truth: f64) {
        let Some(Interval { low, high }) = interval else { return };
        self.given += 1;
        self.too_high += u64::from(low > truth);
        self.too_low += u64::from(high < truth);
        self.widths += (high - low) / truth;
    }

    fn covered(&self) -> f64 {
        1.0 - (self.too_high + self.too_low) as f64 / self.given as f64
    }
}

fn main() -> ExitCode {
    let is_full = std::env::args().any(|argument| argument == "--full");
    // In a few dozen runs, chance alone moves a coverage by several points.
    let (least, most) = if is_full { (0.90, 0.99) } else { (0.80, 1.0) };
    println!("95 % intervals of exponential TTFTs: runs with one, of these the truth inside, mean width");
    let mut faults = Vec::new();
    for case in &CASES {
        let runs = if is_full { FULL_RUNS } else { case.quick_runs };
        if runs == 0 {
            continue;
        }
        println!("{:?}, {} requests, {runs} runs", case.process, case.requests);
        for (figure, tally) in FIGURES.into_iter().zip(tally(case, runs)) {
            print!("  {figure:5} given {:4}", tally.given);
            match tally.given {
                0 => println!(),
                given => println!(
                    "  covered {:5.1} %  too high {:2}  too low {:2}  width {:3.0} %",
                    tally.covered() * 100.0,
                    tally.too_high,
                    tally.too_low,
                    tally.widths / given as f64 * 100.0
                ),
            }
            let share = tally.given as f64 / runs as f64;
            let mut fault = |what: &str| {
                faults.push(format!("{:?}, {} requests, {figure}: {what}", case.process, case.requests));
            };
            if case.given.contains(&figure) {
                if share < 0.9 {
                    fault("too few runs have an interval");
                }
                if !(least..=most).contains(&tally.covered()) {
                    fault("the truth is inside too rarely or too often");
                }
            }
            if case.not_given.contains(&figure) && share > 0.05 {
                fault("runs that are too short have an interval");
            }
            // Wherever one is given: at most 1 in 10 runs shows a wrong one.
            if (tally.too_high + tally.too_low) as f64 > 0.1 * runs as f64 + if is_full { 0.0 } else { 3.0 } {
                fault("more than a tenth of the runs have a wrong interval");
            }
        }
    }
    for fault in &faults {
        println!("FAILED: {fault}");
    }
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn tally(case: &Case, runs: u64) -> [Tally; 5] {
    let mut tallies = [Tally::default(); 5];
    for run in 0..runs {
        let Intervals { avg, p50, p90, p95, p99 } = intervals(&case.process.draw(case.requests, run));
        // Mean and percentiles of an exponential distribution.
        let quantile = |share: f64| -case.process.mean_ms() * (1.0 - share).ln();
        let truths = [case.process.mean_ms(), quantile(0.5), quantile(0.9), quantile(0.95), quantile(0.99)];
        for ((tally, interval), truth) in tallies.iter_mut().zip([avg, p50, p90, p95, p99]).zip(truths) {
            tally.add(interval, truth);
        }
    }
    tallies
}

/// The intervals that the report of such a run has for TTFT.
fn intervals(drawn: &[(f64, f64)]) -> Intervals {
    let records: Vec<Record> = drawn.iter().map(|(due_s, ttft_s)| record(*due_s, *ttft_s)).collect();
    let phases = Phases { measured_from_ns: 0, measured_to_ns: records[records.len() - 1].due_ns + 1 };
    let report = summarize(&RunData {
        config: Config {
            url: "http://localhost:8000".into(),
            model: "m".into(),
            tokenizer: "builtin".into(),
            tokenizer_sha256: None,
            load: Load::Open {
                request_rate_per_s: 1.0 / SPACING_S,
                duration_s: 1.0,
                warm_up_s: 0.0,
                arrival: Arrival::Poisson,
                max_concurrency: None,
                max_in_flight: 10_000,
                drain_timeout_s: 60.0,
            },
            seed: 1,
            request_timeout_s: 300.0,
            extra_body: serde_json::Map::new(),
        },
        spec: solve(&Workload::default()).unwrap(),
        first_chunk_threshold: 16,
        records,
        phases,
        ended_ns: 0,
        counts: ScheduleCounts::default(),
        steady_state_reached: None,
        last_turn_sent_in_warm_up: None,
        is_partial: false,
        error_limit_reached: false,
        watched: Watched::default(),
        telemetry: Telemetry::default(),
        preparation: Preparation::default(),
        environment: Environment {
            benchd_version: "0".into(),
            protocol_version: 1,
            host: "h".into(),
            os: "o".into(),
            cpus: 1,
            command_line: vec![],
            seed: 1,
            plan_hash: "p".into(),
            started_at_epoch_s: 0.0,
            origin_monotonic_ns: 0,
        },
        row_context: RowContext {
            phases,
            session_prefix: "s".into(),
            origin_epoch_ms: 0.0,
            save_events: false,
        },
    });
    report.stats.intervals[&Metric::Ttft]
}

/// A reply of one token.
fn record(due_s: f64, ttft_s: f64) -> Record {
    // Instants of some hours at most.
    #[allow(clippy::cast_possible_truncation)]
    let ns = |s: f64| (s * 1e9) as i64;
    let (due_ns, first_ns) = (ns(due_s), ns(due_s + ttft_s));
    Record {
        session: Some(0),
        turn: Some(1),
        due_ns,
        cap_wait_ns: 0,
        sent_ns: Some(due_ns),
        first_token_ns: Some(first_ns),
        first_answer_ns: Some(first_ns),
        first_chunk_ns: None,
        last_token_ns: Some(first_ns),
        completed_ns: Some(first_ns),
        events: 1,
        reads: 1,
        is_whole: false,
        gaps: Gaps::default(),
        event_tokens: None,
        outcome: Outcome::Ok,
        error: None,
        finish_reason: None,
        planned_input_tokens: None,
        input_tokens: None,
        input_tokens_source: None,
        output_tokens: Some(1),
        output_tokens_source: None,
        reasoning_tokens: None,
        cached_tokens: None,
        expected_cached_tokens: None,
        reply_tokens: None,
        new_connection: false,
        resent: false,
    }
}
