//! CPU times of this process and of the machine, as Linux tells them; other systems tell nothing.

use std::time::Duration;

/// CPU over a span of time.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    /// Length of the span.
    pub seconds: f64,
    /// Cores that all our threads together kept busy, on average.
    pub process_cores: f64,
    /// Our busiest thread.
    pub busiest_thread: String,
    /// Share of a core that it kept busy.
    pub busiest_thread_cores: f64,
    /// Share of the machine's CPU time that its host gave to others.
    pub stolen_share: Option<f64>,
    /// Share of the time that our control group was throttled.
    pub throttled_share: Option<f64>,
}

/// CPU times at an instant.
#[derive(Clone, Debug)]
pub struct Snapshot {
    at: std::time::Instant,
    /// Thread number, name, time on a CPU.
    threads: Vec<(i32, String, Duration)>,
    /// Clock ticks of all CPUs: all, and stolen.
    ticks: Option<(u64, u64)>,
    throttled: Option<Duration>,
}

/// Shortest span whose shares mean something, given that the kernel counts stolen time in ticks of 10 ms.
const SHORTEST: Duration = Duration::from_millis(900);

impl Usage {
    /// What was used from one instant to another; absent for spans of under a second.
    pub fn between(from: &Snapshot, to: &Snapshot) -> Option<Usage> {
        let span = to.at.checked_duration_since(from.at).filter(|span| *span >= SHORTEST)?;
        let before = |id: i32| {
            from.threads.iter().find(|(known, ..)| *known == id).map_or(Duration::ZERO, |(_, _, time)| *time)
        };
        let mut busy: Vec<(&str, f64)> = to
            .threads
            .iter()
            .map(|(id, name, time)| {
                (name.as_str(), time.saturating_sub(before(*id)).as_secs_f64() / span.as_secs_f64())
            })
            .collect();
        busy.sort_by(|a, b| b.1.total_cmp(&a.1));
        let (name, cores) = busy.first()?;
        let stolen_share = from.ticks.zip(to.ticks).and_then(|((all, stolen), (all_after, stolen_after))| {
            let all = all_after.checked_sub(all).filter(|all| *all > 0)?;
            Some(stolen_after.checked_sub(stolen)? as f64 / all as f64)
        });
        let throttled =
            from.throttled.zip(to.throttled).and_then(|(before, after)| after.checked_sub(before));
        Some(Usage {
            seconds: span.as_secs_f64(),
            process_cores: busy.iter().map(|(_, cores)| cores).sum(),
            busiest_thread: (*name).to_owned(),
            busiest_thread_cores: *cores,
            stolen_share,
            throttled_share: throttled.map(|time| time.as_secs_f64() / span.as_secs_f64()),
        })
    }
}

#[cfg(target_os = "linux")]
impl Snapshot {
    /// CPU times now; absent where they cannot be read.
    pub fn take() -> Option<Snapshot> {
        use procfs::{CurrentSI, KernelStats, process::Process};

        let process = Process::myself().ok()?;
        let threads = process
            .tasks()
            .ok()?
            // A thread may end while it is looked at.
            .filter_map(Result::ok)
            .filter_map(|task| {
                let name = task.stat().ok()?.comm;
                Some((task.tid, name, Duration::from_nanos(task.schedstat().ok()?.sum_exec_runtime)))
            })
            .collect();
        let ticks = KernelStats::current().ok().and_then(|stats| {
            let cpu = stats.total;
            let used = cpu.user + cpu.nice + cpu.system + cpu.idle;
            let rest = [cpu.iowait, cpu.irq, cpu.softirq, cpu.steal].into_iter().flatten().sum::<u64>();
            Some((used + rest, cpu.steal?))
        });
        Some(Snapshot { at: std::time::Instant::now(), threads, ticks, throttled: throttled(&process) })
    }
}

#[cfg(not(target_os = "linux"))]
impl Snapshot {
    /// Nothing: this system does not tell.
    pub fn take() -> Option<Snapshot> {
        None
    }
}

/// How long our control group has been throttled since it was made.
#[cfg(target_os = "linux")]
fn throttled(process: &procfs::process::Process) -> Option<Duration> {
    process.cgroups().ok()?.into_iter().find_map(|group| {
        let path = group.pathname.trim_start_matches('/');
        let is_unified = group.hierarchy == 0;
        let folder = match is_unified {
            true => "/sys/fs/cgroup",
            false if group.controllers.iter().any(|c| c == "cpu") => "/sys/fs/cgroup/cpu",
            false => return None,
        };
        let text = std::fs::read_to_string(std::path::Path::new(folder).join(path).join("cpu.stat")).ok()?;
        throttled_time(&text)
    })
}

/// The throttled time of a `cpu.stat`, of either version of control groups.
#[cfg(any(test, target_os = "linux"))]
fn throttled_time(text: &str) -> Option<Duration> {
    text.lines().find_map(|line| match line.split_once(' ')? {
        ("throttled_usec", micros) => micros.trim().parse().ok().map(Duration::from_micros),
        ("throttled_time", nanos) => nanos.trim().parse().ok().map(Duration::from_nanos),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(
        at: std::time::Instant,
        threads: &[(i32, &str, u64)],
        ticks: (u64, u64),
        throttled_ms: u64,
    ) -> Snapshot {
        Snapshot {
            at,
            threads: threads
                .iter()
                .map(|(id, name, ms)| (*id, (*name).to_owned(), Duration::from_millis(*ms)))
                .collect(),
            ticks: Some(ticks),
            throttled: Some(Duration::from_millis(throttled_ms)),
        }
    }

    #[test]
    fn usage_is_what_was_added_over_the_span() {
        let start = std::time::Instant::now();
        let from = snapshot(start, &[(1, "main", 500), (2, "data", 100)], (1000, 10), 40);
        let threads = [(1, "main", 600), (2, "data", 1700), (3, "prompts", 200)];
        let to = snapshot(start + Duration::from_secs(2), &threads, (1400, 14), 140);
        let usage = Usage::between(&from, &to).unwrap();
        assert_eq!((usage.busiest_thread.as_str(), usage.busiest_thread_cores), ("data", 0.8));
        assert!((usage.process_cores - 0.95).abs() < 1e-12, "a thread that was born meanwhile counts whole");
        assert_eq!((usage.stolen_share, usage.throttled_share), (Some(0.01), Some(0.05)));
        assert_eq!(Usage::between(&from, &snapshot(start + SHORTEST / 2, &threads, (1400, 14), 40)), None);
    }

    #[test]
    fn both_kinds_of_control_group_tell_throttled_time() {
        let second = "usage_usec 5\nnr_throttled 2\nthrottled_usec 1500\n";
        let first = "nr_periods 0\nnr_throttled 0\nthrottled_time 1500000\n";
        for text in [second, first] {
            assert_eq!(throttled_time(text), Some(Duration::from_micros(1500)), "{text}");
        }
        assert_eq!(throttled_time("usage_usec 5\n"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_snapshot_holds_this_thread() {
        let snapshot = Snapshot::take().unwrap();
        assert!(!snapshot.threads.is_empty());
        assert!(snapshot.ticks.is_some_and(|(all, stolen)| all > stolen));
    }
}
