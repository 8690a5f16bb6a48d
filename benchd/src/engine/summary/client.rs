//! What was seen of ourselves, beside the requests that it may have touched.

use proto::metric;
use proto::report::ClientReport;

use super::Selection;
use crate::engine::run_data::RunData;
use crate::engine::watch::Stall;

/// The client of a run.
pub(super) fn report(data: &RunData, selection: &Selection<'_>) -> ClientReport {
    let is_inside = |stall: &&Stall| stall.to_ns > selection.from_ns && stall.from_ns < selection.to_ns;
    let stalls: Vec<Stall> = data.watched.stalls.iter().filter(is_inside).copied().collect();
    let touched = selection.sent().filter(|r| {
        let (from_ns, to_ns) = (r.sent_ns.unwrap_or(r.due_ns), r.completed_ns.unwrap_or(i64::MAX));
        // Sorted, and none within another: the first that ends after the request began is the only candidate.
        let next = stalls.partition_point(|stall| stall.to_ns <= from_ns);
        stalls.get(next).is_some_and(|stall| stall.from_ns < to_ns)
    });
    let usage = data.watched.usage.as_ref();
    ClientReport {
        requests_in_stalls: touched.count() as u64,
        stalls: stalls.len() as u64,
        longest_stall_ms: stalls.iter().map(|s| s.to_ns - s.from_ns).max().map(metric::ms),
        process_cores: usage.map(|u| u.process_cores),
        busiest_thread: usage.map(|u| u.busiest_thread.clone()),
        busiest_thread_cores: usage.map(|u| u.busiest_thread_cores),
        stolen_share: usage.and_then(|u| u.stolen_share),
        throttled_share: usage.and_then(|u| u.throttled_share),
    }
}
