//! What is selected, pooled and counted, figure by figure.

use std::collections::BTreeMap;

use proto::metric::{Dist, Metric};
use proto::record::{Outcome, Phases, Record, TokenSource};
use proto::report::Report;

use super::{MS, S, aborted, answered, failed, open_loop, refused, run, with_events};
use crate::engine::run_data::ScheduleCounts;
use crate::engine::summary::{Selection, latency, summarize};

fn dist(report: &Report, metric: Metric) -> Dist {
    report.stats.dists[&metric]
}

#[track_caller]
fn near(got: Option<f64>, want: f64) {
    let got = got.expect("there is a value");
    assert!((got - want).abs() < 1e-9, "got {got}, want {want}");
}

// Selection.

#[test]
fn a_request_belongs_to_the_phase_of_its_due_whenever_it_was_sent_or_answered() {
    let late = |due_ns: i64| Record { sent_ns: Some(due_ns + 500 * MS), ..answered(1, due_ns) };
    let records = vec![late(S - 1), late(S), answered(2, 2 * S), late(3 * S - 1), answered(1, 3 * S)];
    let report = summarize(&run(records));
    let b = &report.benchmark;
    assert_eq!((b.total_requests, b.warmup_requests, b.measured_requests, b.drain_requests), (5, 1, 3, 1));
    assert_eq!(dist(&report, Metric::Latency).count, 3);
    assert_eq!(b.measured_s, 2.0);
    near(Some(b.duration_s), 2.19 + 1e-9);
    assert!(!b.statistics_of_all);
}

#[test]
fn statistics_are_of_all_when_nothing_was_measured() {
    let report = summarize(&run(vec![answered(1, 0), answered(2, 3 * S)]));
    assert!(report.benchmark.statistics_of_all);
    assert_eq!((report.benchmark.measured_requests, report.benchmark.measured_s), (0, 0.0));
    assert_eq!(dist(&report, Metric::Ttft).count, 2);
    // From the first due to the last completion.
    near(report.stats.measured_request_rate, 2.0 / (3.19 + 1e-9));
    near(report.stats.throughput_tok_s, 20.0 / (3.19 + 1e-9));
}

#[test]
fn statistics_are_of_all_when_steady_state_was_never_reached() {
    let mut data = run(vec![answered(1, S), answered(2, 2 * S)]);
    data.phases = Phases { measured_from_ns: i64::MAX, measured_to_ns: i64::MAX };
    data.steady_state_reached = Some(false);
    let report = summarize(&data);
    assert!(report.benchmark.statistics_of_all);
    assert_eq!(report.benchmark.warmup_requests, 2);
    assert_eq!(dist(&report, Metric::Ttft).count, 2);
}

#[test]
fn an_empty_run_has_counts_of_zero_and_no_figures() {
    let report = summarize(&run(vec![]));
    assert_eq!(report.benchmark.total_requests, 0);
    assert!(report.stats.dists.values().all(|d| *d == Dist::default()));
    assert_eq!(report.stats.throughput_tok_s, None);
    assert_eq!(report.stats.error_rate, None);
    assert_eq!(report.load.mean_in_flight, None);
    assert_eq!(report.hit_rate.planned, None);
    assert!(report.histograms.is_empty());
}

// Latencies.

#[test]
fn latencies_are_over_successes_and_lateness_over_all_that_was_sent() {
    let slow = with_events(answered(1, S), S + 900 * MS, &[10, 10]);
    let mut records: Vec<Record> =
        [100, 200, 300].map(|ms| with_events(answered(1, S), S + ms * MS, &[10, 10])).into();
    records.push(Record { outcome: Outcome::Truncated, ..slow });
    records.push(Record { sent_ns: Some(S + 5 * MS), ..aborted(2, S) });
    records.push(refused(S));
    let report = summarize(&run(records));
    let ttft = dist(&report, Metric::Ttft);
    assert_eq!((ttft.count, ttft.max), (3, Some(300.0)));
    for (got, want) in [(ttft.avg, 200.0), (ttft.p50, 200.0), (ttft.p90, 280.0), (ttft.p99, 298.0)] {
        near(got, want);
    }
    near(dist(&report, Metric::Fc).avg, 220.0);
    assert_eq!(dist(&report, Metric::Icl).count, 6);
    let lag = dist(&report, Metric::DispatchLag);
    assert_eq!(
        (lag.count, lag.max),
        (5, Some(5.0)),
        "the failed and the aborted one were sent, the refused was not"
    );
}

#[test]
fn waiting_for_a_place_is_no_lateness_of_the_client_but_counts_from_due() {
    let waited = Record { sent_ns: Some(S + 30 * MS), cap_wait_ns: 28_000_000, ..answered(1, S) };
    let report = summarize(&run(vec![waited]));
    near(dist(&report, Metric::CapWait).avg, 28.0);
    near(dist(&report, Metric::DispatchLag).avg, 2.0);
    near(dist(&report, Metric::Ttft).avg, 70.0);
    near(dist(&report, Metric::TtftFromDue).avg, 100.0);
    near(dist(&report, Metric::LatencyFromDue).avg, 190.0);
}

#[test]
fn what_a_reply_does_not_have_enters_no_average() {
    let short = with_events(answered(1, S), S + 40 * MS, &[]);
    let report = summarize(&run(vec![short, answered(1, S)]));
    assert_eq!(dist(&report, Metric::Ttft).count, 2);
    for metric in [Metric::Fc, Metric::Tpot] {
        assert_eq!(dist(&report, metric).count, 1, "{metric:?}");
    }
    near(dist(&report, Metric::Tpot).avg, 10.0);
}

#[test]
fn a_token_weighs_the_same_whatever_event_brought_it() {
    let mut record = with_events(answered(1, S), S + 100 * MS, &[10, 40]);
    record.event_tokens = Some(Box::new([1.0, 1.0, 4.0]));
    record.output_tokens = Some(6);
    let report = summarize(&run(vec![record]));
    let (icl, itl) = (dist(&report, Metric::Icl), dist(&report, Metric::Itl));
    assert_eq!((icl.count, icl.avg), (2, Some(25.0)));
    assert_eq!((itl.count, itl.avg), (5, Some(10.0)));
}

#[test]
fn each_turn_has_a_row_and_one_without_successes_has_no_figures() {
    let longer = Record { input_tokens: Some(102), ..answered(1, S) };
    let records = vec![answered(1, S), longer, failed(2, S, Outcome::Timeout, "late")];
    let report = summarize(&run(records));
    let [first, second] = &report.per_turn[..] else { panic!("{:?}", report.per_turn) };
    assert_eq!((first.turn, first.count, first.avg_isl), (1, 2, Some(101.0)));
    assert_eq!(first.dists[&Metric::Latency].p50, Some(190.0));
    assert_eq!((second.turn, second.count, second.avg_isl), (2, 0, None));
    assert_eq!(second.dists[&Metric::Latency], Dist::default());
}

// Throughput and rates.

#[test]
fn throughput_counts_the_tokens_that_arrived_inside_whoever_they_belong_to() {
    // At 0.99 (before), 1.00 and 1.01 s, of a request that was sent in warm-up.
    let early = with_events(answered(1, S - 100 * MS), S - 10 * MS, &[10, 10]);
    // At 2.99 s, at 3.00 s (after), of one that fell due inside.
    let late = with_events(answered(1, 2 * S), 3 * S - 10 * MS, &[10]);
    // At 2 s, of one that broke.
    let broken = Record { outcome: Outcome::Reset, ..with_events(answered(1, S), 2 * S, &[]) };
    let report = summarize(&run(vec![early, late, broken]));
    near(report.stats.throughput_tok_s, 4.0 / 2.0);
}

#[test]
fn throughput_weighs_events_by_their_tokens() {
    let mut early = with_events(answered(1, S - 100 * MS), S - 10 * MS, &[10, 10]);
    early.event_tokens = Some(Box::new([100.0, 3.0, 4.5]));
    let report = summarize(&run(vec![early, answered(2, 2 * S)]));
    near(report.stats.throughput_tok_s, (7.5 + 10.0) / 2.0);
}

#[test]
fn the_request_rate_counts_successes_that_ended_inside() {
    let records = vec![
        answered(1, S - 100 * MS),        // ends inside
        answered(2, 2 * S),               // begins and ends inside
        answered(1, 3 * S - 100 * MS),    // ends after
        failed(1, S, Outcome::Empty, ""), // fails
    ];
    let report = summarize(&run(records));
    near(report.stats.measured_request_rate, 2.0 / 2.0);
    near(report.stats.input_throughput_tok_s, 300.0 / 2.0);
}

#[test]
fn mean_lengths_are_of_successes_that_were_measured() {
    let longer = with_events(Record { input_tokens: Some(108), ..answered(1, S) }, S + MS, &[1; 19]);
    let cut = Record { outcome: Outcome::Truncated, ..with_events(answered(1, S), S + MS, &[1; 99]) };
    let report = summarize(&run(vec![answered(2, 0), answered(1, S), longer, cut]));
    near(report.stats.avg_input_tokens, 104.0);
    near(report.stats.avg_output_tokens, 15.0);
    near(report.load.achieved_osl, 15.0);
    near(report.load.planned_isl, 100.0);
    assert_eq!(report.load.planned_osl, 10.0);
}

#[test]
fn slots_are_counted_by_where_they_went_out() {
    let mut data = run(vec![
        Record { sent_ns: Some(S + 1), new_connection: true, ..answered(1, S - 1) },
        Record { sent_ns: Some(S + 2), ..answered(1, S - 1) },
        Record { resent: true, ..answered(1, S) },
        Record { new_connection: true, ..answered(2, 2 * S) },
        Record { sent_ns: Some(3 * S), ..answered(1, 3 * S - 1) },
        refused(2 * S),
    ]);
    data.config.load = open_loop(2.0);
    data.counts = ScheduleCounts {
        planned_slots: Some(7),
        planned_slots_measured: Some(5),
        unsent: 1,
        ready_waits_ms: vec![1.0, 3.0],
        ..ScheduleCounts::default()
    };
    let load = summarize(&data).load;
    assert_eq!((load.planned_slots, load.sent, load.refused, load.unsent), (Some(7), 5, 1, 1));
    assert_eq!(load.asked_rate_per_s, Some(2.0));
    near(load.planned_rate_per_s, 2.5);
    near(load.sent_rate_per_s, 2.0);
    assert_eq!((load.ready_wait_ms.count, load.ready_wait_ms.avg), (2, Some(2.0)));
    assert_eq!((load.new_connections, load.resent), (1, 1), "the first connection was made in warm-up");
}

// Outcomes.

#[test]
fn failures_are_counted_by_kind_with_three_samples_that_differ() {
    let status = |code, text| failed(1, S, Outcome::HttpStatus(code), text);
    let mut records =
        vec![failed(1, 0, Outcome::Connect, "refused"), status(503, "busy"), aborted(1, S), refused(S)];
    records.extend(["a", "a", "b", "c", "d", "a"].map(|text| status(500, text)));
    records.push(answered(1, S));
    let report = summarize(&run(records));
    let failures = &report.failures;
    assert_eq!(failures.total, 8);
    let kinds: Vec<_> = failures.kinds.iter().map(|k| (k.outcome.as_str(), k.http_status, k.count)).collect();
    let want = [("http_status", Some(500), 6), ("connect", None, 1), ("http_status", Some(503), 1)];
    assert_eq!(kinds, want, "most frequent first");
    assert_eq!(failures.kinds[0].samples, ["a", "b", "c"]);
    near(Some(failures.kinds[0].rate), 6.0 / 9.0);
    let refused = &failures.kinds[1];
    assert_eq!(refused.by_phase, BTreeMap::from([("warm_up".to_owned(), 1)]), "by due");
    assert_eq!((&failures.kinds[0].by_turn, &refused.by_turn), (&[(1, 6)].into(), &[(1, 1)].into()));
    let b = &report.benchmark;
    assert_eq!((b.failed_requests, b.aborted_requests, b.refused_requests), (8, 1, 1));
}

#[test]
fn the_error_rate_is_of_measured_completions() {
    let records = vec![
        failed(1, 0, Outcome::Connect, "in warm-up"),
        failed(1, S, Outcome::Timeout, ""),
        answered(1, S),
        answered(2, S),
        answered(1, S),
        aborted(2, S),
        refused(S),
    ];
    near(summarize(&run(records)).stats.error_rate, 0.25);
}

// Prompts, turns and hit rates.

#[test]
fn prompts_are_exact_off_or_uncounted() {
    let off = |input_tokens| Record { input_tokens: Some(input_tokens), ..answered(1, S) };
    let own_count = Record { input_tokens_source: Some(TokenSource::Tokenizer), ..answered(1, S) };
    let no_answer = failed(1, S, Outcome::Reset, "");
    let records =
        vec![answered(1, S), answered(2, S), off(98), off(98), off(101), own_count, no_answer, refused(S)];
    let load = summarize(&run(records)).load;
    assert_eq!(load.exact_prompts, 2);
    assert_eq!(load.residuals.into_iter().collect::<Vec<_>>(), [(-2, 2), (1, 1)]);
    assert_eq!(load.uncounted_prompts, 2, "a refused slot had no prompt");
}

#[test]
fn the_turn_mix_is_of_what_was_sent() {
    let records = vec![
        answered(1, 0),
        answered(1, S),
        failed(2, S, Outcome::Reset, ""),
        aborted(2, S),
        answered(2, S),
        refused(S),
    ];
    let mix: Vec<_> = summarize(&run(records))
        .load
        .turn_mix
        .iter()
        .map(|t| (t.turn, t.sent, t.planned, t.achieved))
        .collect();
    assert_eq!(mix, [(1, 1, 0.5, Some(0.25)), (2, 3, 0.5, Some(0.75))]);
}

#[test]
fn hit_rates_are_weighted_by_tokens() {
    let early_end = Record { expected_cached_tokens: Some(96), cached_tokens: Some(88), ..answered(2, S) };
    let records = vec![answered(1, S), answered(2, S), early_end, aborted(2, S)];
    let hit_rate = summarize(&run(records)).hit_rate;
    // Of the plan: over the turns that were sent. Of the replies: over those that came.
    near(hit_rate.planned, (40.0 + 3.0 * 110.0) / 700.0);
    near(hit_rate.planned_by_blocks, (32.0 + 3.0 * 96.0) / 700.0);
    near(hit_rate.expected, (40.0 + 110.0 + 96.0) / 500.0);
    // Nobody holds the state of a reply's last token, so that 96 tokens fill five blocks and not six.
    near(hit_rate.expected_by_blocks, (32.0 + 96.0 + 80.0) / 500.0);
    near(hit_rate.reported, (40.0 + 110.0 + 88.0) / 500.0);
    assert_eq!((hit_rate.reported_requests, hit_rate.reported_missing), (3, None));
}

#[test]
fn a_hit_rate_that_is_missing_says_why() {
    let silent = Record { cached_tokens: None, ..answered(1, S) };
    let hit_rate = summarize(&run(vec![silent.clone()])).hit_rate;
    assert_eq!((hit_rate.reported, hit_rate.reported_requests), (None, 0));
    assert!(hit_rate.reported_missing.unwrap().contains("cached_tokens"));
    assert_eq!(hit_rate.first_turn_unexpected, None);
    let no_usage = Record { input_tokens_source: Some(TokenSource::Tokenizer), ..silent };
    let hit_rate = summarize(&run(vec![no_usage])).hit_rate;
    assert!(hit_rate.reported_missing.unwrap().contains("no answer carried usage"));
}

#[test]
fn first_turns_may_find_the_shared_part_and_the_template_and_no_more() {
    let first = |cached| Record { cached_tokens: Some(cached), ..answered(1, S) };
    // 40 shared and 3 of the template; later turns do not matter.
    let expected = summarize(&run(vec![first(43), first(0), answered(2, S)])).hit_rate;
    near(expected.first_turn_unexpected, 0.0);
    let unexpected = summarize(&run(vec![first(53), first(0), answered(2, S)])).hit_rate;
    near(unexpected.first_turn_unexpected, 10.0 / 200.0);
}

// In flight.

#[test]
fn requests_in_flight_have_a_mean_over_the_measured_part_and_a_peak_over_the_whole() {
    let lasting = |due_ns: i64, ms| with_events(answered(1, due_ns), due_ns + ms * MS, &[]);
    // Three at once in warm-up; of the measured 2 s one request fills 0.5 s and one that began before 0.1 s.
    let records = vec![
        lasting(0, 100),
        lasting(0, 100),
        lasting(0, 100),
        lasting(900 * MS, 200),
        lasting(2 * S, 500),
        refused(S),
    ];
    let load = summarize(&run(records)).load;
    near(load.mean_in_flight, 0.6 / 2.0);
    assert_eq!(load.peak_in_flight, 3);
}

#[test]
fn what_never_completed_is_in_flight_to_the_end() {
    let load = summarize(&run(vec![aborted(1, 2 * S), answered(1, S)])).load;
    near(load.mean_in_flight, (1.0 + 0.19) / 2.0);
}

#[test]
fn requests_that_pile_up_show_as_growth() {
    let piling_up = (0..20).map(|i| aborted(1, S + i * 100 * MS)).collect();
    // One more in each of 20 spans of 0.1 s.
    near(summarize(&run(piling_up)).load.in_flight_growth_per_s, 10.0);
}

// Histograms.

fn decode(text: &str) -> hdrhistogram::Histogram<u64> {
    use base64::Engine;
    let bytes = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
    hdrhistogram::serialization::Deserializer::new().deserialize(&mut bytes.as_slice()).unwrap()
}

#[test]
fn histograms_hold_the_values_that_the_statistics_are_of() {
    let mut bursty = with_events(answered(1, S), S + 123_456_000, &[10, 40]);
    bursty.event_tokens = Some(Box::new([1.0, 1.0, 4.0]));
    let report = summarize(&run(vec![bursty, answered(2, S), failed(1, S, Outcome::Reset, "")]));
    for (metric, dist) in &report.stats.dists {
        let decoded = decode(&report.histograms[&format!("{}_us", metric.name())]);
        assert_eq!(decoded.len(), dist.count, "{metric:?}");
        let (max_us, want_us) = (decoded.max(), dist.max.unwrap() * 1000.0);
        assert!((max_us as f64 - want_us).abs() <= want_us * 0.001 + 0.5, "{metric:?}: {max_us} µs");
    }
    // Five tokens came 10 ms apart, and nine of the other reply.
    assert_eq!(decode(&report.histograms["itl_us"]).count_between(9_990, 10_010), 14);
}

#[test]
fn a_metric_without_values_has_no_histogram() {
    let report = summarize(&run(vec![failed(1, S, Outcome::Reset, "")]));
    assert_eq!(report.histograms.keys().collect::<Vec<_>>(), ["cap_wait_us", "dispatch_lag_us"]);
}

#[test]
fn pools_beyond_the_exact_limit_are_a_histograms_and_marked() {
    // Eight gaps of 10 ms, and one that is longer in later replies: each percentile has another value.
    let last_gap_ms = |i| {
        if i < 20 {
            20
        } else if i < 41 {
            30
        } else {
            40
        }
    };
    let reply = |i: i64| with_events(answered(1, S), S, &[10, 10, 10, 10, 10, 10, 10, 10, last_gap_ms(i)]);
    let mut data = run((0..50).map(reply).collect());
    data.records.push(with_events(answered(1, S), S, &[50]));
    let selection = Selection::of(&data);
    let gaps = 50 * 9 + 1;
    let (exact, _) = latency::stats_with_limit(&data.records, &selection, gaps);
    assert_eq!(exact.from_histogram, []);
    let (rough, histograms) = latency::stats_with_limit(&data.records, &selection, gaps - 1);
    assert_eq!(rough.from_histogram, [Metric::Icl, Metric::Itl]);
    for metric in rough.from_histogram.iter() {
        let (rough, exact) = (rough.dists[metric], exact.dists[metric]);
        assert_eq!(rough.count, exact.count);
        let figures = |d: Dist| [d.avg, d.p50, d.p90, d.p95, d.p99, d.max].map(Option::unwrap);
        assert_eq!(figures(exact)[1..], [10.0, 20.0, 30.0, 40.0, 50.0]);
        for (rough, exact) in figures(rough).into_iter().zip(figures(exact)) {
            assert!((rough - exact).abs() <= exact * 0.001, "{metric:?}: {rough} for {exact}");
        }
        assert_eq!(decode(&histograms[&format!("{}_us", metric.name())]).len(), gaps);
    }
    assert_eq!(rough.dists[&Metric::Ttft], exact.dists[&Metric::Ttft], "latencies are few, and exact");
}

#[test]
fn replies_that_arrive_in_bursts_are_told_from_those_of_several_tokens_an_event() {
    // Ten events of one token, 10 ms apart, each read alone.
    let steady = summarize(&run(vec![answered(1, S), answered(2, S)])).stream;
    assert_eq!((steady.tokens_per_event, steady.events_per_read), (Some(1.0), Some(1.0)));
    assert_eq!((steady.burst_share, steady.is_bursty), (Some(0.0), false));

    let with_tokens = |tokens| Record { output_tokens: Some(tokens), ..answered(1, S) };
    let speculative = summarize(&run(vec![with_tokens(25), with_tokens(15)])).stream;
    assert_eq!((speculative.tokens_per_event, speculative.is_bursty), (Some(2.0), false));

    let first_ns = S + 100 * MS;
    let in_bursts = with_events(answered(1, S), first_ns, &[0, 0, 0, 40, 0, 0, 0, 40, 0]);
    let bursty = summarize(&run(vec![Record { reads: 4, ..in_bursts }])).stream;
    assert_eq!((bursty.events_per_read, bursty.is_bursty), (Some(2.5), true));
    assert!((bursty.burst_share.unwrap() - 7.0 / 9.0).abs() < 1e-12);
}

#[test]
fn time_to_the_answer_leaves_reasoning_out() {
    let thought = Record { first_answer_ns: Some(S + 150 * MS), reasoning_tokens: Some(5), ..answered(1, S) };
    let only_thought = Record { first_answer_ns: None, ..answered(2, S) };
    let report = summarize(&run(vec![thought, only_thought]));
    assert_eq!(dist(&report, Metric::Ttft).count, 2);
    assert_eq!((dist(&report, Metric::Ttfo).count, dist(&report, Metric::Ttfo).avg), (1, Some(150.0)));
    assert_eq!(report.stats.avg_reasoning_tokens, Some(5.0));
}

// Two hundred slow requests and two hundred quick ones, one kind after the other or in turn.
#[test]
fn intervals_are_of_the_order_in_which_requests_were_due_and_not_in_which_they_were_recorded() {
    let intervals = |is_slow: fn(i64) -> bool, is_recorded_late: fn(i64) -> bool| {
        let mut order: Vec<i64> = (0..400).collect();
        order.sort_by_key(|i| (is_recorded_late(*i), *i));
        let records = order.into_iter().map(|i| {
            let record = answered(1, S + i * 5 * MS);
            let first_ns = record.due_ns + if is_slow(i) { 150 * MS } else { (100 + i % 7) * MS };
            with_events(record, first_ns, &[10; 9])
        });
        summarize(&run(records.collect())).stats.intervals[&Metric::Ttft]
    };
    let in_turn = intervals(|i| i % 2 == 0, |_| false);
    assert!(in_turn.avg.is_some());
    assert_eq!(intervals(|i| i % 2 == 0, |i| i % 2 == 0), in_turn);
    assert_eq!(intervals(|i| i < 200, |_| false).avg, None);
    assert_eq!(intervals(|i| i < 200, |i| i % 2 == 0).avg, None);
}
