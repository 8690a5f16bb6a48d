//! The run's clock: nanoseconds on CLOCK_MONOTONIC since one origin, and that origin on other clocks.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A clock with an origin; cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
    origin_epoch_ms: f64,
    origin_monotonic_ns: i64,
}

impl Clock {
    /// A clock whose origin is now.
    pub fn start() -> Self {
        let monotonic = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let origin = Instant::now();
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Clock {
            origin,
            origin_epoch_ms: epoch.as_secs_f64() * 1e3,
            origin_monotonic_ns: monotonic.tv_sec * 1_000_000_000 + monotonic.tv_nsec,
        }
    }

    /// Nanoseconds since the origin.
    pub fn now_ns(&self) -> i64 {
        // 2^63 ns are 292 years.
        i64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(i64::MAX)
    }

    /// Nanoseconds from an instant before the origin to it; 0 for a later one.
    pub fn ns_since(&self, earlier: Instant) -> i64 {
        i64::try_from(self.origin.duration_since(earlier).as_nanos()).unwrap_or(i64::MAX)
    }

    /// The instant that lies `ns` after the origin; the origin itself for negative values.
    pub fn instant(&self, ns: i64) -> Instant {
        self.origin + Duration::from_nanos(u64::try_from(ns).unwrap_or(0))
    }

    /// The origin in ms of the Unix epoch.
    pub fn origin_epoch_ms(&self) -> f64 {
        self.origin_epoch_ms
    }

    /// The origin in ns of CLOCK_MONOTONIC, which other processes of the machine can read.
    pub fn origin_monotonic_ns(&self) -> i64 {
        self.origin_monotonic_ns
    }
}

/// Seconds as nanoseconds; what does not fit is clamped.
pub fn ns(seconds: f64) -> i64 {
    // A float beyond the range saturates, and a NaN becomes 0; inputs were checked before.
    #[allow(clippy::cast_possible_truncation)]
    let ns = (seconds * 1e9).round() as i64;
    ns
}
