//! Latency tables: of all measured requests, and of each turn. A percentile with few values above it is marked.

use std::io::{self, Write};

use proto::interval::Interval;
use proto::metric::{Dist, Metric};
use proto::report::{MIN_VALUES_ABOVE, Report, TurnStats};

use super::table::{MISSING, Table, count, decimal, ms, percent, shown};

/// A TTFT from due so many times that from sent, …
const LATE_FACTOR: f64 = 1.5;
/// … and so many ms above it, deserves a sentence.
const LATE_MS: f64 = 5.0;

/// Rows of the table of all requests, in its order.
const ROWS: [Metric; 12] = [
    Metric::Ttft,
    Metric::Ttfo,
    Metric::Fc,
    Metric::Tpot,
    Metric::Itl,
    Metric::Icl,
    Metric::Latency,
    Metric::DispatchLag,
    Metric::CapWait,
    Metric::TtftFromDue,
    Metric::FcFromDue,
    Metric::LatencyFromDue,
];

/// Writes the latencies of all measured requests.
pub(super) fn latencies(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let dists = &report.stats.dists;
    writeln!(out, "Latency (ms, over successes)")?;
    let mut table = Table::new(1, &["", "avg", "p50 ", "p90 ", "p95 ", "p99 ", "max", "count"]);
    let mut marks = false;
    for metric in ROWS {
        let dist = dists.get(&metric).copied().unwrap_or_default();
        if is_left_out(metric, &dist, report) {
            continue;
        }
        let mut cells = vec![label(metric, report.first_chunk_threshold), ms(dist.avg)];
        for (q, value) in [(0.5, dist.p50), (0.9, dist.p90), (0.95, dist.p95), (0.99, dist.p99)] {
            cells.push(marked(value, q, dist.count, &mut marks));
        }
        cells.extend([ms(dist.max), count(dist.count)]);
        table.row(cells);
    }
    table.write(out)?;
    footnote(marks, out)?;
    streams(report, out)?;
    intervals(report, out)
}

/// Says what the table does not: waiting before sending, and replies that did not arrive one token at a time.
fn streams(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let p99 = |metric| report.stats.dists.get(&metric).and_then(|dist: &Dist| dist.p99);
    if let (Some(sent), Some(due)) = (p99(Metric::Ttft), p99(Metric::TtftFromDue))
        && due > sent * LATE_FACTOR
        && due - sent > LATE_MS
    {
        writeln!(
            out,
            "  Requests waited before they were sent: the p99 of TTFT is {} ms from sent and {} ms from due, which is what a \
             user would have felt.",
            ms(Some(sent)),
            ms(Some(due))
        )?;
    }
    let stream = &report.stream;
    let is_more = |n: Option<f64>| n.is_some_and(|n| n > 1.05);
    if is_more(stream.tokens_per_event) || is_more(stream.events_per_read) {
        writeln!(
            out,
            "  {} tokens by content event, {} content events by read",
            decimal(stream.tokens_per_event, 2),
            decimal(stream.events_per_read, 2)
        )?;
    }
    if stream.is_bursty {
        writeln!(
            out,
            "  Replies arrive in bursts: {} of the events came together with the one before. ITL, and TPOT where a whole \
             answer comes at once, are then the path's and not the model's.",
            percent(stream.burst_share)
        )?;
    }
    Ok(())
}

/// Writes the confidence intervals; in files of older versions there are none.
fn intervals(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let intervals = &report.stats.intervals;
    let rows: Vec<[Option<Interval>; 5]> =
        intervals.values().map(|i| [i.avg, i.p50, i.p90, i.p95, i.p99]).collect();
    let cells = || rows.iter().flatten();
    if cells().count() == 0 {
        return Ok(());
    }
    if cells().all(Option::is_none) {
        return writeln!(out, "95 % intervals: none, the run has too few independent requests");
    }
    writeln!(out, "95 % intervals (ms)")?;
    let mut table = Table::new(1, &["", "avg", "p50", "p90", "p95", "p99"]);
    for (metric, row) in intervals.keys().zip(&rows) {
        let label = label(*metric, report.first_chunk_threshold);
        table.row(std::iter::once(label).chain(row.iter().map(|interval| ends(*interval))));
    }
    table.write(out)?;
    if cells().any(Option::is_none) {
        writeln!(out, "  {MISSING} too few independent requests for one")?;
    }
    Ok(())
}

fn ends(interval: Option<Interval>) -> String {
    match interval {
        Some(Interval { low, high }) => format!("{}–{}", ms(Some(low)), ms(Some(high))),
        None => MISSING.to_owned(),
    }
}

/// What says nothing beside its neighbour: chunks where they are tokens, waits under no cap.
fn is_left_out(metric: Metric, dist: &Dist, report: &Report) -> bool {
    match metric {
        // Without reasoning the first token is one of the answer.
        Metric::Ttfo => dist.avg == report.stats.dists.get(&Metric::Ttft).and_then(|ttft| ttft.avg),
        Metric::CapWait => dist.max.is_none_or(|max| max <= 0.0),
        Metric::Icl => match (dist.avg, report.stats.dists.get(&Metric::Itl).and_then(|itl| itl.avg)) {
            (Some(icl), Some(itl)) => (icl - itl).abs() <= 0.005 * itl,
            (icl, _) => icl.is_none(),
        },
        _ => false,
    }
}

/// Writes the latencies of each turn, in two tables that a screen can hold.
pub(super) fn per_turn(report: &Report, out: &mut impl Write) -> io::Result<()> {
    if report.per_turn.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nEach turn (ms, over successes)")?;
    let mut marks = false;
    turn_table(report, &[Metric::Ttft, Metric::Fc, Metric::Latency], true, &mut marks, out)?;
    writeln!(out)?;
    turn_table(report, &[Metric::Tpot, Metric::Itl], false, &mut marks, out)?;
    footnote(marks, out)
}

fn turn_table(
    report: &Report,
    metrics: &[Metric],
    has_counts: bool,
    marks: &mut bool,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut header = vec!["turn".to_owned()];
    if has_counts {
        header.extend(["count".to_owned(), "avg ISL".to_owned()]);
    }
    for metric in metrics {
        let average = format!("{} avg", label(*metric, report.first_chunk_threshold));
        header.extend([average, "p50 ".to_owned(), "p99 ".to_owned()]);
    }
    let mut table = Table::new(0, &header.iter().map(String::as_str).collect::<Vec<_>>());
    for index in shown(report.per_turn.len()) {
        match index.and_then(|index| report.per_turn.get(index)) {
            Some(turn) => table.row(turn_cells(turn, metrics, has_counts, marks)),
            None => table.row(["…".to_owned()]),
        }
    }
    table.write(out)
}

fn turn_cells(turn: &TurnStats, metrics: &[Metric], has_counts: bool, marks: &mut bool) -> Vec<String> {
    let mut cells = vec![turn.turn.to_string()];
    if has_counts {
        cells.extend([count(turn.count), decimal(turn.avg_isl, 1)]);
    }
    for metric in metrics {
        let dist = turn.dists.get(metric).copied().unwrap_or_default();
        cells.push(ms(dist.avg));
        cells.push(marked(dist.p50, 0.5, dist.count, marks));
        cells.push(marked(dist.p99, 0.99, dist.count, marks));
    }
    cells
}

fn label(metric: Metric, first_chunk_threshold: u32) -> String {
    match metric {
        Metric::Ttft => "TTFT".to_owned(),
        Metric::Ttfo => "TTFO".to_owned(),
        Metric::Fc => format!("FC ({first_chunk_threshold})"),
        Metric::Tpot => "TPOT".to_owned(),
        Metric::Icl => "ICL".to_owned(),
        Metric::Itl => "ITL".to_owned(),
        Metric::Latency => "latency".to_owned(),
        Metric::DispatchLag => "dispatch lag".to_owned(),
        Metric::CapWait => "cap wait".to_owned(),
        Metric::TtftFromDue => "TTFT from due".to_owned(),
        Metric::FcFromDue => format!("FC ({first_chunk_threshold}) from due"),
        Metric::LatencyFromDue => "latency from due".to_owned(),
    }
}

/// A percentile with its mark, or with a space in the mark's place.
fn marked(value: Option<f64>, q: f64, count: u64, marks: &mut bool) -> String {
    let is_thin = value.is_some() && values_above(q, count) < MIN_VALUES_ABOVE;
    *marks |= is_thin;
    format!("{}{}", ms(value), if is_thin { '*' } else { ' ' })
}

fn values_above(q: f64, count: u64) -> f64 {
    // 100 × (1 − 0.9) is a little under 10 in binary.
    count as f64 * (1.0 - q) + 1e-6
}

fn footnote(marks: bool, out: &mut impl Write) -> io::Result<()> {
    if marks {
        writeln!(out, "  * fewer than {MIN_VALUES_ABOVE} values above it")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_marked_when_fewer_than_ten_values_lie_above_it() {
        for (q, count, want) in
            [(0.9, 100, false), (0.9, 99, true), (0.99, 1000, false), (0.99, 999, true), (0.5, 20, false)]
        {
            let mut marks = false;
            marked(Some(1.0), q, count, &mut marks);
            assert_eq!(marks, want, "{q} of {count}");
        }
        let mut marks = false;
        assert_eq!(marked(None, 0.99, 0, &mut marks), "– ");
        assert!(!marks);
    }
}
