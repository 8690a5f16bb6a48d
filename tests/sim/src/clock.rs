//! CLOCK_MONOTONIC in nanoseconds: the one clock of every instant that is logged or scheduled, so that
//! another process on the machine can put its own instants beside ours.

use rustix::time::{ClockId, clock_gettime};

/// Now, in ns of CLOCK_MONOTONIC.
pub(crate) fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    // Both fields are non-negative: the clock starts at boot.
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// Milliseconds (or the like, by `scale` ns) to whole ns. Negative and NaN become 0.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // clamped at 0; `as` saturates above
pub(crate) fn to_ns(value: f64, scale: f64) -> u64 {
    (value * scale).round().max(0.0) as u64
}
