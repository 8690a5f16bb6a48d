//! What failed: kinds, counts, and what the first few of each said.

use std::collections::{BTreeMap, HashMap};

use proto::record::{Outcome, Phases, Record};
use proto::report::{FailureKind, Failures};

/// Texts kept of each kind.
const SAMPLES: usize = 3;

/// The failures of a run, in any phase.
pub(super) fn failures(records: &[Record], phases: &Phases) -> Failures {
    let completions = records.iter().filter(|r| r.outcome.is_completion()).count();
    let mut kinds: HashMap<Outcome, FailureKind> = HashMap::new();
    for record in records.iter().filter(|r| r.outcome.is_failure()) {
        let kind = kinds.entry(record.outcome).or_insert_with(|| FailureKind {
            outcome: record.outcome.name().to_owned(),
            http_status: match record.outcome {
                Outcome::HttpStatus(status) => Some(status),
                _ => None,
            },
            count: 0,
            rate: 0.0,
            by_phase: BTreeMap::new(),
            by_turn: BTreeMap::new(),
            samples: Vec::new(),
        });
        kind.count += 1;
        *kind.by_phase.entry(phases.of(record.due_ns).name().to_owned()).or_default() += 1;
        if let Some(turn) = record.turn {
            *kind.by_turn.entry(turn).or_default() += 1;
        }
        if let Some(error) = &record.error
            && kind.samples.len() < SAMPLES
            && !kind.samples.iter().any(|known| **known == **error)
        {
            kind.samples.push(error.to_string());
        }
    }
    let mut kinds: Vec<FailureKind> = kinds.into_values().collect();
    for kind in &mut kinds {
        kind.rate = kind.count as f64 / completions as f64;
    }
    kinds.sort_by(|a, b| {
        b.count.cmp(&a.count).then_with(|| (&a.outcome, a.http_status).cmp(&(&b.outcome, b.http_status)))
    });
    Failures { total: kinds.iter().map(|k| k.count).sum(), kinds }
}
