//! How the replies arrived: tokens by event, events by read, and bursts.

use proto::metric;
use proto::record::Record;
use proto::report::{MAX_BURST_SHARE, StreamReport};

use super::{Selection, share};

/// The streams of a selection.
pub(super) fn report(selection: &Selection<'_>) -> StreamReport {
    let sum = |of: fn(&Record) -> u64| selection.successes().map(of).sum::<u64>() as f64;
    let events = sum(|r| u64::from(r.events));
    let counted = |r: &Record| if r.output_tokens.is_some() { u64::from(r.events) } else { 0 };
    let gaps = sum(|r| r.gaps.len() as u64);
    let burst_share = share(sum(|r| metric::burst_gaps(r) as u64), gaps);
    StreamReport {
        tokens_per_event: share(sum(|r| u64::from(r.output_tokens.unwrap_or(0))), sum(counted)),
        events_per_read: share(events, sum(|r| u64::from(r.reads))),
        burst_share,
        whole_answers: selection.successes().filter(|r| r.is_whole).count() as u64,
        is_bursty: burst_share.is_some_and(|share| share > MAX_BURST_SHARE),
    }
}
