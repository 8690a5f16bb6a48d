//! A finished run → its report. Pure: reads records and what the schedule counted, changes nothing, and sends nothing
//! back upstream. Every formula from one record is `proto::metric`'s; here they are selected, pooled and set beside
//! what was asked for.

mod client;
mod flight;
mod hit_rate;
mod latency;
mod load;
mod outcomes;
mod server;
mod stream;
use proto::metric;
use proto::record::{Outcome, Phase, Record};
use proto::report::{Benchmark, Report, SCHEMA_VERSION};

use crate::engine::run_data::RunData;
use crate::engine::verdict::{Evidence, verdict};

pub use flight::{Drift, Growth};

/// The part of a run that its statistics are made of.
struct Selection<'a> {
    /// Requests due in it.
    records: Vec<&'a Record>,
    /// First instant.
    from_ns: i64,
    /// First instant after it.
    to_ns: i64,
    /// Whether this is the whole run, because there is no measured part.
    is_all: bool,
}

impl<'a> Selection<'a> {
    fn of(data: &'a RunData) -> Self {
        let phases = &data.phases;
        let measured: Vec<&Record> =
            data.records.iter().filter(|r| phases.of(r.due_ns) == Phase::Measured).collect();
        if !measured.is_empty() {
            let (from_ns, to_ns) = (phases.measured_from_ns, phases.measured_to_ns);
            return Selection { records: measured, from_ns, to_ns, is_all: false };
        }
        let (from_ns, to_ns) = span(data);
        // The last completion is inside; what took no time has no rates.
        let to_ns = to_ns.saturating_add(i64::from(to_ns > from_ns));
        Selection { records: data.records.iter().collect(), from_ns, to_ns, is_all: true }
    }

    fn seconds(&self) -> f64 {
        metric::seconds((self.to_ns - self.from_ns).max(0))
    }

    /// A number of things in this part as things a second; absent when it has no length.
    fn per_second(&self, things: f64) -> Option<f64> {
        (self.to_ns > self.from_ns).then(|| things / self.seconds())
    }

    fn holds(&self, at_ns: i64) -> bool {
        (self.from_ns..self.to_ns).contains(&at_ns)
    }

    fn sent(&self) -> impl Iterator<Item = &'a Record> {
        self.records.iter().copied().filter(|r| r.sent_ns.is_some())
    }

    fn successes(&self) -> impl Iterator<Item = &'a Record> {
        self.records.iter().copied().filter(|r| r.outcome.is_ok())
    }
}

/// From the first due instant to the last completion, or to the end of the run where requests were given up at it.
fn span(data: &RunData) -> (i64, i64) {
    let from_ns = data.records.iter().map(|r| r.due_ns).min().unwrap_or(0);
    let is_aborted = |r: &Record| r.outcome == Outcome::Aborted;
    let given_up_ns = data.records.iter().any(is_aborted).then_some(data.ended_ns);
    let to_ns = data.records.iter().filter_map(|r| r.completed_ns).chain(given_up_ns).max();
    (from_ns, to_ns.unwrap_or(from_ns).max(from_ns))
}

/// Mean of some values; absent when there is none.
fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u64), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

/// `part` of `whole`; absent when there is no whole.
fn share(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

/// The report of a run.
pub fn summarize(data: &RunData) -> Report {
    let selection = Selection::of(data);
    let (stats, histograms) = latency::stats(&data.records, &selection);
    let flight = flight::Flight::of(&data.records, &selection);
    let load = load::report(data, &selection, &flight);
    let server = server::report(data, &selection);
    let hit_rate = hit_rate::rates(data, &selection, &server);
    let benchmark = benchmark(data, &selection);
    let stream = stream::report(&selection);
    let client = client::report(data, &selection);
    let verdict = verdict(&Evidence {
        spec: &data.spec,
        asked: &data.config.load,
        benchmark: &benchmark,
        stats: &stats,
        load: &load,
        hit_rate: &hit_rate,
        stream: &stream,
        client: &client,
        last_turn_sent_in_warm_up: data.last_turn_sent_in_warm_up,
        planned_slots_measured: data.counts.planned_slots_measured,
        growth: flight.queue,
    });
    Report {
        schema_version: SCHEMA_VERSION,
        verdict,
        config: data.config.clone(),
        spec: data.spec.clone(),
        first_chunk_threshold: data.first_chunk_threshold,
        benchmark,
        stats,
        per_turn: latency::per_turn(&data.spec, &selection),
        load,
        hit_rate,
        stream,
        client,
        failures: outcomes::failures(&data.records, &data.phases),
        preparation: data.preparation.clone(),
        histograms,
        environment: data.environment.clone(),
        server: Some(server),
        server_samples: server::samples(&data.telemetry),
    }
}

fn benchmark(data: &RunData, selection: &Selection<'_>) -> Benchmark {
    let count = |is: &dyn Fn(&Record) -> bool| data.records.iter().filter(|r| is(r)).count() as u64;
    let in_phase = |phase| count(&|r| data.phases.of(r.due_ns) == phase);
    let (from_ns, to_ns) = span(data);
    Benchmark {
        total_requests: data.records.len() as u64,
        warmup_requests: in_phase(Phase::WarmUp),
        measured_requests: in_phase(Phase::Measured),
        drain_requests: in_phase(Phase::Drain),
        failed_requests: count(&|r| r.outcome.is_failure()),
        refused_requests: count(&|r| r.outcome == Outcome::Refused),
        aborted_requests: count(&|r| r.outcome == Outcome::Aborted),
        duration_s: metric::seconds(to_ns - from_ns),
        measured_s: if selection.is_all { 0.0 } else { selection.seconds() },
        is_partial: data.is_partial,
        error_limit_reached: data.error_limit_reached,
        steady_state_reached: data.steady_state_reached,
        statistics_of_all: selection.is_all,
    }
}

#[cfg(test)]
mod tests;
