//! The server's own counters beside the requests.

use proto::record::{Outcome, Record, TokenSource};
use proto::report::{HitRates, Report, ServerKind};

use super::{MS, answered, failed, run};
use crate::engine::run_data::RunData;
use crate::engine::summary::summarize;
use crate::engine::telemetry::{Reading, Telemetry};

/// A reading of vLLM's counters: prompt tokens, of these cached, requests with their TTFT in s.
fn reading(queries: u64, hits: u64, requests: u64, ttft_sum_s: f64) -> Reading {
    Reading {
        kind: ServerKind::Vllm,
        running: Some(1.0),
        waiting: Some(0.0),
        kv_cache_usage: Some(0.5),
        prompt_tokens: Some(queries),
        generation_tokens: Some(10 * requests),
        cache_queries: Some(queries),
        cache_hits: Some(hits),
        ttft_count: Some(requests),
        ttft_sum_s: Some(ttft_sum_s),
    }
}

/// A closed loop that measured from 1 s to 3 s: two requests before, three inside, one after, each of 100 or 200
/// tokens; and a server that counted exactly these on top of what it had.
fn counted() -> RunData {
    let records = vec![
        answered(1, 0),
        answered(2, 500 * MS),
        answered(1, 1200 * MS),
        answered(2, 1500 * MS),
        answered(2, 2500 * MS),
        answered(1, 3200 * MS),
    ];
    let mut data = run(records);
    data.telemetry = Telemetry {
        url: Some("http://h/metrics".into()),
        readings: vec![
            (-10 * MS, reading(5000, 900, 70, 7.0)),
            (900 * MS, reading(5300, 1050, 72, 7.18)),
            (1001 * MS, Reading { running: Some(3.0), ..reading(5300, 1050, 72, 7.18) }),
            (2000 * MS, reading(5600, 1200, 74, 7.34)),
            (3000 * MS, Reading { waiting: Some(4.0), ..reading(5800, 1310, 75, 7.42) }),
            (3500 * MS, reading(5900, 1350, 76, 7.5)),
        ],
        is_whole: true,
        ..Telemetry::default()
    };
    data
}

fn hit_rate(data: &RunData) -> HitRates {
    summarize(data).hit_rate
}

fn why(data: &RunData) -> String {
    let rates = hit_rate(data);
    assert_eq!((rates.counted, rates.counted_from_ms, rates.counted_whole_run), (None, None, None));
    rates.counted_missing.unwrap()
}

#[test]
fn the_window_is_from_the_first_scrape_inside_to_the_first_after_the_last_measured_request() {
    let Report { hit_rate, server, server_samples, .. } = summarize(&counted());
    // The last measured request completed at 2.69 s.
    assert_eq!((hit_rate.counted_from_ms, hit_rate.counted_to_ms), (Some(1001.0), Some(3000.0)));
    assert_eq!(hit_rate.counted, Some(260.0 / 500.0));
    assert_eq!(hit_rate.counted, hit_rate.reported);
    assert_eq!(hit_rate.counted_missing, None);
    let server = server.unwrap();
    let window = server.window.unwrap();
    assert_eq!(
        (window.samples, window.change.cache_queries, window.change.cache_hits),
        (3, Some(500), Some(260))
    );
    assert_eq!((window.running.mean, window.running.max), (Some(5.0 / 3.0), Some(3.0)));
    assert_eq!((window.waiting.mean, window.waiting.max), (Some(4.0 / 3.0), Some(4.0)));
    assert_eq!(window.kv_cache_usage.max, Some(0.5));
    assert_eq!(server_samples.len(), 6);
    assert_eq!((server_samples[0].at_ms, server_samples[0].cache_hits), (-10.0, Some(900)));
}

#[test]
fn the_servers_ttft_stands_beside_that_of_our_requests_in_the_same_time() {
    let window = summarize(&counted()).server.unwrap().window.unwrap();
    assert_eq!((window.change.ttft_count, window.client_ttft_count), (Some(3), 3));
    let theirs = window.change.avg_ttft_ms.unwrap();
    assert!((theirs - 80.0).abs() < 1e-9, "{theirs}");
    assert_eq!(window.client_avg_ttft_ms, Some(100.0));
}

#[test]
fn over_the_whole_run_the_counters_are_of_the_same_requests_as_usage() {
    let Report { hit_rate, server, .. } = summarize(&counted());
    let server = server.unwrap();
    let whole = server.whole_run.unwrap();
    assert_eq!(whole.cache_queries, Some(server.own_prompt_tokens));
    assert_eq!(whole.cache_hits, server.own_cached_tokens);
    assert_eq!((hit_rate.counted_whole_run, hit_rate.reported_whole_run), (Some(0.5), Some(0.5)));
}

#[test]
fn a_run_without_a_measured_part_is_counted_whole() {
    let mut data = counted();
    data.phases.measured_from_ns = i64::MAX;
    let window = summarize(&data).server.unwrap().window.unwrap();
    assert_eq!((window.change.from_ms, window.change.to_ms), (-10.0, 3500.0));
}

#[test]
fn requests_of_others_make_the_counters_say_nothing_of_ours() {
    let mut data = counted();
    for (_, reading) in &mut data.telemetry.readings[3..] {
        *reading = Reading { cache_queries: reading.cache_queries.map(|n| n + 20), ..*reading };
    }
    assert!(why(&data).contains("count 920 prompt tokens in it, and it sent 900; others used it too"));
    // A little may be a preparation's, counted late.
    for (_, reading) in &mut data.telemetry.readings[3..] {
        *reading = Reading { cache_queries: reading.cache_queries.map(|n| n - 12), ..*reading };
    }
    assert_eq!(hit_rate(&data).counted_missing, None);
}

#[test]
fn counters_of_one_replica_among_several_are_not_taken_for_all() {
    let mut data = counted();
    data.records.push(answered(2, 2600 * MS));
    assert!(why(&data).contains("they leave out a part"));
}

#[test]
fn a_request_that_failed_may_or_may_not_have_been_counted() {
    let mut data = counted();
    data.records.push(failed(2, 2600 * MS, Outcome::Timeout, "late"));
    assert_eq!(hit_rate(&data).counted_missing, None);
    for (_, reading) in &mut data.telemetry.readings[4..] {
        *reading = Reading { cache_queries: reading.cache_queries.map(|n| n + 200), ..*reading };
    }
    assert_eq!(hit_rate(&data).counted_missing, None);
}

#[test]
fn without_usage_the_template_is_no_reason_against_the_counters() {
    let mut data = counted();
    for record in &mut data.records {
        *record = Record {
            input_tokens_source: Some(TokenSource::Tokenizer),
            cached_tokens: None,
            input_tokens: record.input_tokens.map(|n| n - n / 20),
            ..record.clone()
        };
    }
    let rates = hit_rate(&data);
    assert_eq!((rates.counted, rates.reported_whole_run), (Some(260.0 / 500.0), None));
}

#[test]
fn a_counted_hit_rate_that_is_missing_says_why() {
    let mut none = counted();
    none.telemetry = Telemetry {
        missing: Some("http://h/metrics answers with status 404".into()),
        ..Telemetry::default()
    };
    assert_eq!(why(&none), "http://h/metrics answers with status 404");

    let mut cut = counted();
    cut.telemetry.is_whole = false;
    cut.telemetry.last_failure = Some("it hung".into());
    assert!(why(&cut).contains("the scrape after the last answer failed: it hung"));

    let mut restarted = counted();
    restarted.telemetry.readings[2].1 = reading(0, 0, 0, 0.0);
    assert!(why(&restarted).contains("restarted"));

    let mut nameless = counted();
    for (_, reading) in &mut nameless.telemetry.readings {
        *reading = Reading { cache_hits: None, ..*reading };
    }
    assert!(why(&nameless).contains("no vllm:prefix_cache_queries_total"));

    let mut short = counted();
    short.telemetry.readings.drain(1..5);
    assert!(why(&short).contains("too short"));
    // The gauges are unknown then too, and not those of another part.
    assert_eq!(summarize(&short).server.unwrap().window, None);

    let mut idle = counted();
    let last = idle.telemetry.readings[5].1;
    idle.telemetry.readings[2].1 = last;
    idle.telemetry.readings[3].1 = last;
    idle.telemetry.readings[4].1 = last;
    assert!(why(&idle).contains("no prompt in the measured part"));
}

#[test]
fn a_counter_that_first_shows_up_inside_the_run_counts_from_nothing() {
    let mut data = counted();
    for (_, reading) in &mut data.telemetry.readings {
        reading.cache_hits = reading.cache_hits.map(|n| n - 900).filter(|n| *n > 0);
    }
    let rates = hit_rate(&data);
    assert_eq!(rates.counted_whole_run, Some(0.5));
}
