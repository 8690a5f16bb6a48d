//! The results of a run: verdict, counts, the load asked for beside the load achieved, hit rates, failures,
//! preparation. Latencies are in `latency`.

use std::io::{self, Write};

use proto::plan::{Arrival, Load};
use proto::report::{
    ClientReport, HitRates, LoadReport, ReasonKind, Report, ServerKind, ServerReport, Trust,
};

use super::latency;
use super::table::{MISSING, Table, count, counted, decimal, ms, percent};

/// Turns that the failures of a kind are told apart by.
const TURNS_SHOWN: usize = 8;
/// Longest sample of a failure that is shown, in characters.
const SAMPLE_SHOWN: usize = 200;

/// Writes whether the numbers can be trusted.
pub(super) fn trust(report: &Report, is_coloured: bool, out: &mut impl Write) -> io::Result<()> {
    let (word, colour) = match report.verdict.trust {
        Trust::Valid => ("valid", 32),
        Trust::Suspect => ("suspect", 33),
    };
    if is_coloured {
        writeln!(out, "verdict: \u{1b}[{colour}m{word}\u{1b}[0m")
    } else {
        writeln!(out, "verdict: {word}")
    }
}

/// Writes why they cannot.
pub(super) fn reasons(report: &Report, out: &mut impl Write) -> io::Result<()> {
    for reason in &report.verdict.reasons {
        let kind = match reason.kind {
            ReasonKind::Client => "client",
            ReasonKind::Load => "load",
            ReasonKind::Server => "server",
        };
        writeln!(out, "  {kind}: {}", reason.text)?;
    }
    Ok(())
}

/// Writes what was run.
pub(super) fn config(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let config = &report.config;
    writeln!(
        out,
        "\n{}, model {}, tokenizer {}, seed {}",
        config.url, config.model, config.tokenizer, config.seed
    )?;
    match &config.load {
        Load::Closed { concurrency, num_sessions, duration_s, num_requests, .. } => {
            let ends = [
                num_sessions.map(|n| counted(n, "session")),
                num_requests.map(|n| counted(n, "request")),
                duration_s.map(|s| format!("{s} s")),
            ];
            let ends: Vec<String> = ends.into_iter().flatten().collect();
            writeln!(
                out,
                "closed loop of {}, for {}",
                counted(u64::from(*concurrency), "active session"),
                ends.join(" or ")
            )
        }
        Load::Open { request_rate_per_s, duration_s, warm_up_s, arrival, max_concurrency, .. } => {
            let arrival = match arrival {
                Arrival::Constant => "constant".to_owned(),
                Arrival::Poisson => "Poisson".to_owned(),
                Arrival::Gamma { burstiness } => format!("gamma (burstiness {burstiness})"),
            };
            let cap = max_concurrency.map(|c| format!(", at most {c} in flight")).unwrap_or_default();
            writeln!(
                out,
                "open loop of {request_rate_per_s} requests/s, {arrival}, for {duration_s} s of which {warm_up_s} s \
                 warm-up{cap}"
            )
        }
    }
}

/// Writes all results.
pub(super) fn results(report: &Report, out: &mut impl Write) -> io::Result<()> {
    counts(report, out)?;
    planned_and_achieved(&report.load, out)?;
    hit_rates(&report.hit_rate, out)?;
    load_details(&report.load, out)?;
    client(&report.client, out)?;
    writeln!(out)?;
    throughput(report, out)?;
    latency::latencies(report, out)?;
    latency::per_turn(report, out)?;
    if let Some(server) = &report.server {
        self::server(server, out)?;
    }
    failures(report, out)?;
    preparation(report, out)
}

fn counts(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let b = &report.benchmark;
    writeln!(
        out,
        "\nRequests: {} = {} warm-up + {} measured + {} drain",
        count(b.total_requests),
        count(b.warmup_requests),
        count(b.measured_requests),
        count(b.drain_requests)
    )?;
    writeln!(
        out,
        "  of these {} failed, {} refused, {} aborted; {} s in all, {} s measured",
        count(b.failed_requests),
        count(b.refused_requests),
        count(b.aborted_requests),
        decimal(Some(b.duration_s), 1),
        decimal(Some(b.measured_s), 1)
    )
}

fn planned_and_achieved(load: &LoadReport, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "\nLoad")?;
    let mut table = Table::new(1, &["", "planned", "achieved"]);
    let is_open = load.asked_rate_per_s.is_some();
    let rate = |rate| decimal(rate, 2);
    table.row(["requests sent/s".to_owned(), rate(load.planned_rate_per_s), rate(load.sent_rate_per_s)]);
    if is_open && load.planned_rate_per_s != load.asked_rate_per_s {
        table.row(["  asked for".to_owned(), rate(load.asked_rate_per_s)]);
    }
    if let Some(slots) = load.planned_slots {
        table.row(["slots, whole run".to_owned(), count(slots), count(load.sent)]);
    }
    let tokens = |n| decimal(n, 1);
    table.row(["input tokens, mean".to_owned(), tokens(load.planned_isl), tokens(load.achieved_isl)]);
    table.row(["output tokens, mean".to_owned(), tokens(Some(load.planned_osl)), tokens(load.achieved_osl)]);
    for index in super::table::shown(load.turn_mix.len()) {
        match index.and_then(|index| load.turn_mix.get(index)) {
            Some(turn) => table.row([
                format!("share of turn {}", turn.turn),
                percent(Some(turn.planned)),
                percent(turn.achieved),
            ]),
            None => table.row(["…".to_owned()]),
        }
    }
    table.write(out)
}

fn hit_rates(rates: &HitRates, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "\nHit rate (token-weighted)")?;
    let mut table = Table::headless(1);
    table.row(["planned".to_owned(), percent(rates.planned)]);
    table.row(["planned, by blocks".to_owned(), percent(rates.planned_by_blocks)]);
    table.row(["expected from the replies".to_owned(), percent(rates.expected)]);
    table.row(["expected, by blocks".to_owned(), percent(rates.expected_by_blocks)]);
    table.row(["reported by the server".to_owned(), percent(rates.reported)]);
    if rates.counted.is_some() || rates.counted_missing.is_some() {
        table.row(["counted by the server".to_owned(), percent(rates.counted)]);
    }
    table.write(out)?;
    match (&rates.reported, &rates.reported_missing) {
        (None, Some(why)) => writeln!(out, "  not reported: {why}")?,
        (Some(_), _) => writeln!(out, "  reported for {}", counted(rates.reported_requests, "request"))?,
        (None, None) => {}
    }
    if let Some(why) = &rates.counted_missing {
        writeln!(out, "  not counted: {why}")?;
    } else if let (Some(from), Some(to)) = (rates.counted_from_ms, rates.counted_to_ms) {
        writeln!(
            out,
            "  counted between {} and {} s; over the whole run counted {}, reported {}",
            decimal(Some(from / 1e3), 1),
            decimal(Some(to / 1e3), 1),
            percent(rates.counted_whole_run),
            percent(rates.reported_whole_run)
        )?;
    }
    match rates.first_turn_unexpected {
        Some(share) if share > 0.0 => writeln!(
            out,
            "  {} of first-turn tokens were cached beyond the shared part",
            percent(Some(share))
        ),
        _ => Ok(()),
    }
}

fn load_details(load: &LoadReport, out: &mut impl Write) -> io::Result<()> {
    let off: u64 = load.residuals.values().sum();
    let counted_prompts = load.exact_prompts + off;
    writeln!(
        out,
        "\nPrompts: {} of {} exactly as planned",
        count(load.exact_prompts),
        count(counted_prompts)
    )?;
    if off > 0 {
        let list: Vec<String> =
            load.residuals.iter().map(|(by, n)| format!("{by:+} tokens: {}", count(*n))).collect();
        writeln!(out, "  off by {}", list.join(", "))?;
    }
    if load.uncounted_prompts > 0 {
        writeln!(out, "  {} whose prompt tokens the server did not tell", count(load.uncounted_prompts))?;
    }
    let growth = load.in_flight_growth_per_s.map(|g| format!(", growing by {}/s", decimal(Some(g), 3)));
    writeln!(
        out,
        "In flight: mean {}, peak {}{}",
        decimal(load.mean_in_flight, 2),
        count(load.peak_in_flight),
        growth.unwrap_or_default()
    )?;
    writeln!(
        out,
        "Sessions: {} started, {} completed, {} failed",
        count(load.sessions_started),
        count(load.sessions_completed),
        count(load.sessions_failed)
    )?;
    let notes = [
        (load.sessions_beyond_plan, "sessions started beyond plan, because no turn was ready"),
        (load.sessions_cut_short, "sessions cut short, because too many waited for the same turn"),
        (load.refused, "slots refused, because too many requests were in flight"),
        (load.unsent, "slots that still waited for a place at the end"),
        (load.prompt_supply_dry, "turns that waited for a prompt that was not made in time"),
        (load.resent, "requests sent again, because a kept connection was closed"),
        (load.new_connections, "measured requests that made a connection, which their TTFT contains"),
    ];
    for (n, text) in notes.iter().filter(|(n, _)| *n > 0) {
        writeln!(out, "  {text}: {}", count(*n))?;
    }
    let wait = &load.ready_wait_ms;
    if wait.count > 0 {
        writeln!(
            out,
            "  ready turns waited for their slot: mean {} ms, p99 {} ms",
            ms(wait.avg),
            ms(wait.p99)
        )?;
    }
    Ok(())
}

/// What benchd saw of itself.
fn client(client: &ClientReport, out: &mut impl Write) -> io::Result<()> {
    let cores = |cores| decimal(cores, 2);
    let usage = match (&client.busiest_thread, client.process_cores) {
        (Some(thread), Some(_)) => format!(
            "{} cores busy, {} by its thread {thread}",
            cores(client.process_cores),
            cores(client.busiest_thread_cores)
        ),
        _ => "CPU not known".to_owned(),
    };
    writeln!(out, "benchd itself: {usage}; {} above 10 ms", counted(client.stalls, "stall"))?;
    if client.stalls > 0 {
        let touched = counted(client.requests_in_stalls, "request");
        writeln!(out, "  the longest {} ms, {touched} in flight during one", ms(client.longest_stall_ms))?;
    }
    Ok(())
}

fn throughput(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let stats = &report.stats;
    writeln!(
        out,
        "Throughput: {} output tok/s, {} input tok/s, {} successful requests/s; error rate {}\n",
        decimal(stats.throughput_tok_s, 1),
        decimal(stats.input_throughput_tok_s, 1),
        decimal(stats.measured_request_rate, 2),
        percent(stats.error_rate)
    )
}

/// The server's own metrics over the measured part.
fn server(server: &ServerReport, out: &mut impl Write) -> io::Result<()> {
    let Some(window) = &server.window else {
        return match &server.missing {
            Some(why) => writeln!(out, "\nServer's own metrics: none, {why}"),
            None => writeln!(out, "\nServer's own metrics: no two scrapes of the measured part"),
        };
    };
    let kind = match server.kind {
        Some(ServerKind::Vllm) => "vLLM's",
        Some(ServerKind::Sglang) => "SGLang's",
        Some(ServerKind::Llamacpp) => "llama.cpp's",
        None => MISSING,
    };
    writeln!(
        out,
        "\nServer's own metrics (by {kind} names, {} between {} and {} s)",
        counted(window.samples, "scrape"),
        decimal(Some(window.change.from_ms / 1e3), 1),
        decimal(Some(window.change.to_ms / 1e3), 1)
    )?;
    let mut table = Table::new(1, &["", "mean", "max"]);
    for (name, gauge) in [("requests running", &window.running), ("requests waiting", &window.waiting)] {
        table.row([name.to_owned(), decimal(gauge.mean, 1), decimal(gauge.max, 0)]);
    }
    let kv = &window.kv_cache_usage;
    table.row(["KV cache in use".to_owned(), percent(kv.mean), percent(kv.max)]);
    table.write(out)?;
    if let (Some(requests), Some(theirs), Some(ours)) =
        (window.change.ttft_count, window.change.avg_ttft_ms, window.client_avg_ttft_ms)
    {
        writeln!(
            out,
            "  TTFT in this time: mean {} ms by the server for {}, {} ms seen here for {}",
            ms(Some(theirs)),
            counted(requests, "request"),
            ms(Some(ours)),
            count(window.client_ttft_count)
        )?;
    }
    if server.failed_scrapes > 0 {
        let why = server.last_failure.as_deref().unwrap_or(MISSING);
        writeln!(out, "  {} failed: {why}", counted(server.failed_scrapes, "scrape"))?;
    }
    Ok(())
}

fn failures(report: &Report, out: &mut impl Write) -> io::Result<()> {
    if report.failures.total == 0 {
        return Ok(());
    }
    writeln!(out, "\nFailures: {}", count(report.failures.total))?;
    for kind in &report.failures.kinds {
        let status = kind.http_status.map(|code| format!(" {code}")).unwrap_or_default();
        writeln!(
            out,
            "  {}{status}: {} ({} of completions)",
            kind.outcome,
            count(kind.count),
            percent(Some(kind.rate))
        )?;
        if !kind.by_phase.is_empty() {
            let phases: Vec<String> = kind
                .by_phase
                .iter()
                .map(|(phase, n)| format!("{} {}", count(*n), phase.replace('_', "-")))
                .collect();
            let turns: Vec<String> = kind
                .by_turn
                .iter()
                .take(TURNS_SHOWN)
                .map(|(turn, n)| format!("{} of turn {turn}", count(*n)))
                .collect();
            let more = if kind.by_turn.len() > TURNS_SHOWN { ", …" } else { "" };
            writeln!(out, "    {}; {}{more}", phases.join(", "), turns.join(", "))?;
        }
        for sample in &kind.samples {
            writeln!(out, "    {}", shortened(sample))?;
        }
    }
    Ok(())
}

fn shortened(sample: &str) -> String {
    let line = sample.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SAMPLE_SHOWN) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line,
    }
}

fn preparation(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let p = &report.preparation;
    writeln!(out, "\nPreparation: {} outside every phase", counted(p.calibration.len() as u64, "request"))?;
    match &p.template {
        Some(cost) => writeln!(
            out,
            "  the chat template takes {} tokens in the first turn and {} in each later one, within the plan",
            cost.first_turn_tokens, cost.later_turn_tokens
        )?,
        None => writeln!(out, "  the chat template was not counted: the server sends no usage")?,
    }
    for dropped in &p.dropped_parameters {
        writeln!(out, "  parameter {dropped}")?;
    }
    for notice in &p.notices {
        writeln!(out, "  note: {notice}")?;
    }
    Ok(())
}
