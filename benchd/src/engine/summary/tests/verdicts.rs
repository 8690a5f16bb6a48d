//! Each reason of a verdict, just not crossed and just crossed.

use proto::record::{Outcome, Phases, Record};
use proto::report::{ReasonKind, Report, Trust};

use super::{MS, S, answered, closed_loop, failed, open_loop, refused, run, with_events};
use crate::engine::machine::Usage;
use crate::engine::run_data::RunData;
use crate::engine::summary::summarize;
use crate::engine::watch::Stall;

/// An open loop of 10 slots a second for 40 s in which nothing is wrong.
fn sound() -> RunData {
    let mut data = run((0..200)
        .flat_map(|i| [answered(1, i * 200 * MS), answered(2, i * 200 * MS + 100 * MS)])
        .collect());
    data.config.load = open_loop(10.0);
    data.phases = Phases { measured_from_ns: 0, measured_to_ns: 40 * S };
    data.steady_state_reached = None;
    data.last_turn_sent_in_warm_up = Some(true);
    data.counts.planned_slots = Some(400);
    data.counts.planned_slots_measured = Some(400);
    data
}

/// The same with something changed.
fn with(change: impl FnOnce(&mut RunData)) -> RunData {
    let mut data = sound();
    change(&mut data);
    data
}

/// The same with the first `n` records changed.
fn with_first(n: usize, change: impl Fn(&mut Record)) -> RunData {
    with(|data| data.records[..n].iter_mut().for_each(change))
}

fn codes(report: &Report) -> Vec<&str> {
    report.verdict.reasons.iter().map(|r| r.code.as_str()).collect()
}

#[track_caller]
fn is_valid(data: &RunData) {
    let verdict = summarize(data).verdict;
    assert_eq!((verdict.trust, verdict.reasons), (Trust::Valid, vec![]));
}

/// Suspect for one reason alone, whose sentence has these words.
#[track_caller]
fn is_suspect(data: &RunData, kind: ReasonKind, code: &str, words: &str) {
    let report = summarize(data);
    assert_eq!(codes(&report), [code], "{:?}", report.verdict.reasons);
    let reason = &report.verdict.reasons[0];
    assert_eq!((report.verdict.trust, reason.kind), (Trust::Suspect, kind));
    assert!(reason.text.contains(words), "{}", reason.text);
}

#[test]
fn a_run_in_which_nothing_is_wrong_is_valid() {
    is_valid(&sound());
}

#[test]
fn a_stopped_run_is_suspect() {
    is_suspect(&with(|d| d.is_partial = true), ReasonKind::Load, "partial", "stopped after 40.1 s");
}

#[test]
fn a_run_that_sent_nothing_is_suspect() {
    let mut data = run(vec![]);
    is_suspect(&data, ReasonKind::Load, "nothing_sent", "no request was sent");
    data.steady_state_reached = Some(false);
    is_suspect(&data, ReasonKind::Load, "nothing_sent", "no request was sent");
}

#[test]
fn a_closed_loop_is_suspect_when_it_never_got_steady() {
    is_valid(&run(vec![answered(1, S)]));
    let mut data = run(vec![answered(1, S)]);
    data.phases = Phases { measured_from_ns: i64::MAX, measured_to_ns: i64::MAX };
    data.steady_state_reached = Some(false);
    is_suspect(&data, ReasonKind::Load, "no_steady_state", "never reached");
}

#[test]
fn a_run_is_suspect_when_no_request_was_measured() {
    is_suspect(&run(vec![answered(1, 0)]), ReasonKind::Load, "nothing_measured", "no request fell");
}

#[test]
fn a_warm_up_is_too_short_when_no_last_turn_was_sent_in_it() {
    // One step of 0.19 s and a think time of 1.5 s, and 2 s more.
    let data = with(|d| {
        d.last_turn_sent_in_warm_up = Some(false);
        d.spec.think_time_s = 1.5;
    });
    is_suspect(&data, ReasonKind::Load, "warm_up_too_short", "no turn 2 was sent before the warm-up ended");
    assert!(summarize(&data).verdict.reasons[0].text.ends_with("use --warm-up 4 or more"));
}

#[test]
fn lateness_of_the_client_is_bounded_by_a_millisecond_or_a_hundredth_of_the_spacing() {
    let late = |lag_ns: i64| {
        with_first(5, |r| {
            r.sent_ns = Some(r.due_ns + lag_ns);
        })
    };
    is_valid(&late(MS));
    is_suspect(
        &late(2 * MS),
        ReasonKind::Client,
        "dispatch_lag",
        "p99 of the dispatch lag is 2.00 ms, above 1.00 ms",
    );
    // One slot a second leaves 10 ms, a hundred a second still 1 ms; here only the rate asked for is another.
    let at_rate = |rate_per_s, lag_ns: i64| {
        let mut data = late(lag_ns);
        data.config.load = open_loop(rate_per_s);
        data
    };
    is_valid(&at_rate(1.0, 9 * MS));
    is_suspect(&at_rate(1.0, 11 * MS), ReasonKind::Client, "dispatch_lag", "above 10.00 ms");
    is_valid(&at_rate(100.0, MS));
    is_suspect(&at_rate(100.0, 2 * MS), ReasonKind::Client, "dispatch_lag", "above 1.00 ms");
    // In a closed loop a session's requests follow each other by an answer and its think time.
    let mut thinking = late(9 * MS);
    thinking.config.load = closed_loop();
    thinking.spec.think_time_s = 1.0;
    is_valid(&thinking);
    thinking.spec.think_time_s = 0.5;
    is_suspect(&thinking, ReasonKind::Client, "dispatch_lag", "p99 of the dispatch lag is 9.00 ms");
    // Waiting for a place is not the client's doing.
    is_valid(&with_first(5, |r| {
        r.sent_ns = Some(r.due_ns + 20 * MS);
        r.cap_wait_ns = 20_000_000;
    }));
}

#[test]
fn a_prompt_that_was_not_made_in_time_is_a_reason() {
    is_suspect(
        &with(|d| d.counts.prompt_supply_dry = 1),
        ReasonKind::Client,
        "prompt_supply_dry",
        "1 requests waited",
    );
}

#[test]
fn slots_sent_may_be_off_by_a_hundredth_of_those_planned() {
    is_valid(&with(|d| d.counts.planned_slots_measured = Some(404)));
    let off = with(|d| d.counts.planned_slots_measured = Some(405));
    is_suspect(
        &off,
        ReasonKind::Load,
        "rate_off",
        "10.00 requests a second were sent where the schedule had 10.12",
    );
    is_suspect(
        &with(|d| d.counts.planned_slots_measured = Some(395)),
        ReasonKind::Load,
        "rate_off",
        "1.3 % off",
    );
}

#[test]
fn a_slot_that_falls_to_the_other_side_of_an_end_is_no_reason() {
    let few = |planned| {
        with(|d| {
            d.records.truncate(20);
            d.phases.measured_to_ns = 2 * S;
            d.counts.planned_slots_measured = Some(planned);
        })
    };
    is_valid(&few(21));
    is_suspect(&few(22), ReasonKind::Load, "rate_off", "9.1 % off");
}

#[test]
fn sessions_beyond_plan_may_be_a_fiftieth_of_the_slots() {
    is_valid(&with(|d| d.counts.beyond_plan_measured = 8));
    let beyond = with(|d| d.counts.beyond_plan_measured = 9);
    is_suspect(&beyond, ReasonKind::Load, "beyond_plan", "9 sessions were started beyond plan in 400 slots");
}

#[test]
fn a_refused_slot_is_a_reason() {
    let data = with(|d| d.records.push(refused(S)));
    is_suspect(&data, ReasonKind::Load, "refused", "1 slots were refused at --max-in-flight");
}

#[test]
fn prompts_that_the_server_already_held_are_a_reason() {
    // 43 of a first turn are explained; 200 first turns of 100 tokens.
    let held = |tokens: u32| {
        let mut data = sound();
        let firsts = data.records.iter_mut().filter(|r| r.turn == Some(1));
        firsts.for_each(|r| r.cached_tokens = Some(43 + tokens));
        data
    };
    is_valid(&held(1));
    is_suspect(
        &held(2),
        ReasonKind::Load,
        "already_cached",
        "already held 2.0 % of the first turns' prompts",
    );
}

/// A sound run in which so many second turns became first turns.
fn with_mix(changed: usize) -> RunData {
    let mut data = sound();
    for record in data.records.iter_mut().filter(|r| r.turn == Some(2)).take(changed) {
        *record = answered(1, record.due_ns);
    }
    data
}

#[test]
fn the_turn_mix_may_be_off_by_two_points() {
    is_valid(&with_mix(7));
    let report = summarize(&with_mix(9));
    let reason =
        report.verdict.reasons.iter().find(|r| r.code == "turn_mix").expect("9 of 400 are 2.25 points");
    assert!(reason.text.contains("where the plan has 50.0 %"), "{}", reason.text);
}

#[test]
fn shares_and_lengths_are_not_judged_under_two_hundred_requests() {
    let short = |requests: i64| {
        with(|d| {
            d.records.truncate(usize::try_from(requests).unwrap());
            d.records.iter_mut().for_each(|r| r.input_tokens = r.input_tokens.map(|t| t + 50));
            d.phases.measured_to_ns = requests * 100 * MS;
            d.counts.planned_slots_measured = Some(requests.unsigned_abs());
        })
    };
    is_valid(&short(199));
    assert!(codes(&summarize(&short(200))).contains(&"input_length"));
}

#[test]
fn mean_lengths_may_be_off_by_a_fiftieth() {
    let longer = |input: u32, output: u32| {
        with_first(400, |r| {
            r.input_tokens = r.input_tokens.map(|t| t + input);
            r.output_tokens = r.output_tokens.map(|t| t - output);
        })
    };
    is_valid(&longer(3, 0));
    is_suspect(
        &longer(4, 0),
        ReasonKind::Load,
        "input_length",
        "input tokens were 154.0 on average where 150.0",
    );
    is_suspect(
        &longer(0, 1),
        ReasonKind::Load,
        "output_length",
        "output tokens were 9.0 on average where 10.0",
    );
    // 8 of 400 replies one token short are far inside.
    is_valid(&with_first(8, |r| r.output_tokens = Some(9)));
}

#[test]
fn prompts_must_allow_the_hit_rate_within_two_points() {
    // The server finds what the prompts allow.
    let allowing = |less: u32| {
        with_first(400, |r| {
            r.expected_cached_tokens = r.expected_cached_tokens.map(|t| t - less);
            r.cached_tokens = r.expected_cached_tokens;
        })
    };
    is_valid(&allowing(2));
    is_suspect(
        &allowing(4),
        ReasonKind::Load,
        "hit_rate",
        "allow a hit rate of 47.3 % where the plan has 50.0 %",
    );
}

#[test]
fn the_hit_rate_reported_must_lie_between_that_of_blocks_and_that_of_tokens() {
    // By blocks 42.7 %, by tokens 50.0 %, and two points on either side.
    let reporting = |second_turns: u32| {
        let mut data = sound();
        for record in &mut data.records {
            record.cached_tokens = Some(if record.turn == Some(1) { 32 } else { second_turns });
        }
        data
    };
    is_valid(&reporting(91));
    is_suspect(&reporting(89), ReasonKind::Load, "hit_rate_reported", "(42.7 % by blocks of 16)");
    is_valid(&reporting(123));
    is_suspect(&reporting(125), ReasonKind::Load, "hit_rate_reported", "reports a hit rate of 52.3 %");
}

#[test]
fn a_hundredth_of_the_requests_may_fail() {
    // Every second one, so that the mix of turns stays.
    let failing = |n: i64| {
        let mut data = sound();
        for record in data.records.iter_mut().skip(7).step_by(41).take(usize::try_from(n).unwrap()) {
            *record = failed(record.turn.unwrap(), record.due_ns, Outcome::Timeout, "");
        }
        data
    };
    is_valid(&failing(4));
    is_suspect(&failing(5), ReasonKind::Server, "errors", "1.2 % of the requests failed");
}

#[test]
fn an_open_loop_is_not_steady_when_requests_pile_up() {
    // Every request takes longer than the one before.
    let piling_up = |more_ns: i64| {
        let mut data = sound();
        for (i, record) in (0..).zip(&mut data.records) {
            *record = with_events(record.clone(), record.due_ns + 100 * MS + i * more_ns, &[10; 9]);
        }
        data
    };
    is_valid(&piling_up(100_000));
    is_suspect(&piling_up(50 * MS), ReasonKind::Server, "not_steady", "its queue grew by");
    // No warm-up is long enough for it, and none is advised.
    let mut data = piling_up(50 * MS);
    data.last_turn_sent_in_warm_up = Some(false);
    let report = summarize(&data);
    assert_eq!(codes(&report), ["warm_up_too_short", "not_steady"]);
    assert!(!report.verdict.reasons[0].text.contains("--warm-up"));
    // A closed loop cannot pile up: what is in flight is what was asked for.
    let mut data = piling_up(50 * MS);
    data.config.load = closed_loop();
    assert!(!codes(&summarize(&data)).contains(&"not_steady"));
}

#[test]
fn reasons_of_the_client_come_first_and_those_of_the_server_last() {
    let mut data = with_first(40, |r| *r = failed(r.turn.unwrap(), r.due_ns, Outcome::Reset, ""));
    data.is_partial = true;
    data.counts.prompt_supply_dry = 2;
    assert_eq!(codes(&summarize(&data)), ["prompt_supply_dry", "partial", "errors"]);
}

#[test]
fn a_client_that_was_held_up_says_so_when_it_touched_more_than_a_few_requests() {
    // Each request is in flight for 190 ms from its slot, one slot a tenth of a second.
    let stalled = |stalls: &[(i64, i64)]| {
        with(|data| {
            data.watched.stalls =
                stalls.iter().map(|(from, to)| Stall { from_ns: from * MS, to_ns: to * MS }).collect();
        })
    };
    is_valid(&stalled(&[]));
    // Two requests of 400 are half a percent.
    is_valid(&stalled(&[(1010, 1030)]));
    let both = stalled(&[(1010, 1030), (5010, 5060)]);
    is_suspect(
        &both,
        ReasonKind::Client,
        "stalls",
        "held up 2 times for more than 10 ms, the longest for 50 ms, with 4 of 400 requests in flight",
    );
    let client = summarize(&both).client;
    assert_eq!((client.stalls, client.longest_stall_ms, client.requests_in_stalls), (2, Some(50.0), 4));
    // Before and after the measured part nothing is counted.
    is_valid(&stalled(&[(-500, -100), (40_001, 50_000)]));
}

#[test]
fn a_client_that_had_no_cpu_to_spare_says_so() {
    let usage = |thread: f64, stolen: f64, throttled: f64| {
        with(|data| {
            data.watched.usage = Some(Usage {
                seconds: 40.0,
                process_cores: 0.9,
                busiest_thread: "data".into(),
                busiest_thread_cores: thread,
                stolen_share: Some(stolen),
                throttled_share: Some(throttled),
            });
        })
    };
    is_valid(&usage(0.79, 0.009, 0.009));
    is_suspect(&usage(0.81, 0.0, 0.0), ReasonKind::Client, "thread_busy", "thread data was busy for 81.0 %");
    is_suspect(&usage(0.1, 0.011, 0.0), ReasonKind::Client, "cpu_stolen", "the host gave 1.1 %");
    is_suspect(&usage(0.1, 0.0, 0.011), ReasonKind::Client, "cpu_throttled", "throttled for 1.1 %");
    assert_eq!(summarize(&usage(0.5, 0.0, 0.0)).client.process_cores, Some(0.9));
}

#[test]
fn requests_that_were_never_answered_are_missed_when_they_are_more_than_a_few() {
    let unanswered = |n| {
        with_first(n, |r| {
            r.outcome = Outcome::Aborted;
            r.completed_ns = None;
        })
    };
    is_valid(&unanswered(2));
    is_suspect(&unanswered(3), ReasonKind::Server, "unanswered", "3 of 400 requests were still unanswered");
    assert_eq!(summarize(&unanswered(3)).load.unanswered, 3);
    // After a stop there is another reason.
    let mut stopped = unanswered(3);
    stopped.is_partial = true;
    assert_eq!(codes(&summarize(&stopped)), ["partial"]);
}

#[test]
fn a_measured_part_without_an_answer_says_so() {
    let data = with_first(400, |r| {
        r.outcome = Outcome::Aborted;
        r.completed_ns = None;
    });
    assert!(codes(&summarize(&data)).contains(&"nothing_answered"));
}

#[test]
fn a_measured_part_shorter_than_a_request_says_nothing_about_rates() {
    let short = |length_ns| {
        let mut data = run(vec![answered(1, S)]);
        data.phases.measured_to_ns = data.phases.measured_from_ns + length_ns;
        data
    };
    is_valid(&short(200 * MS));
    is_suspect(&short(180 * MS), ReasonKind::Load, "too_short", "0.18 s, less than one request (0.19 s)");
}

#[test]
fn answers_that_were_no_streams_have_no_time_to_first_token() {
    let whole = |n| with_first(n, |r| r.is_whole = true);
    is_valid(&whole(2));
    is_suspect(&whole(3), ReasonKind::Server, "not_streamed", "3 answers came whole");
}
