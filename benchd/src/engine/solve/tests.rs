use super::*;
use proptest::prelude::*;
use proto::spec::{SpecTurn, TemplateCost};

fn workload(isl: u32, osl: u32, hit_rate: Option<f64>, num_turns: u32, ratio: Option<f64>) -> Workload {
    Workload { isl, osl, hit_rate, num_turns, shared_system_prompt_ratio: ratio, ..Workload::default() }
}

#[test]
fn the_requirements_example_gets_a_shared_share_of_0_11() {
    let spec = solve(&workload(2000, 200, Some(0.85), 5, None)).unwrap();
    assert_eq!(spec.shared_system_prompt_ratio, 0.11);
    assert!(!spec.shared_system_prompt_ratio_given);
    assert_eq!((spec.user_tokens_per_turn, spec.system_prompt_tokens), (33, 1501));
    assert_eq!((spec.shared_system_prompt, spec.unique_system_prompt), (165, 1336));
    assert_eq!(spec.effective_isl, 2000.0);
    assert!((spec.effective_hit_rate - 0.85).abs() * 2000.0 <= 0.5);
    assert_eq!(spec.notices.len(), 1, "{:?}", spec.notices);
    assert!(spec.notices[0].contains("default 0 to 0.11"), "{}", spec.notices[0]);
    let totals: Vec<u32> = spec.per_turn.iter().map(|t| t.total).collect();
    assert_eq!(totals, [1534, 1767, 2000, 2233, 2466]);
    assert_eq!((1..=5).map(|k| planned_total(&spec, k)).collect::<Vec<_>>(), totals);
    assert_eq!(spec.per_turn[0].cached, 165);
    assert_eq!((spec.per_turn[1].cached, spec.per_turn[1].cached_by_blocks), (1734, 1728));
}

#[test]
fn the_last_token_of_a_reply_is_in_no_block() {
    let spec = solve(&workload(1000, 64, Some(0.7), 4, Some(0.5))).unwrap();
    let turns: Vec<(u32, u32)> = spec.per_turn.iter().map(|t| (t.cached, t.cached_by_blocks)).collect();
    // 112 shared tokens are seven blocks; 560 with a reply are 35 but for its last token.
    assert_eq!(turns, [(112, 112), (560, 544), (896, 880), (1232, 1216)]);
}

#[test]
fn a_given_share_is_kept_or_refused_and_the_message_names_what_works() {
    let error = solve(&workload(2000, 200, Some(0.85), 5, Some(0.0))).unwrap_err();
    assert!(matches!(error.cause, Cause::HitRateTooHigh { ratio: Some(0.0), .. }));
    assert_eq!(
        error.to_string(),
        "infeasible workload: u = -50.0 user tokens a turn, below 1: a hit rate of 0.85 is too high with a shared \
         system prompt ratio of 0; the nearest that works, changing one alone: isl 1592, or osl 251, or hit rate \
         0.8398, or turns 6, or shared system prompt ratio 0.0639"
    );
    let spec = solve(&workload(2000, 200, Some(0.85), 5, Some(0.07))).unwrap();
    assert_eq!(spec.shared_system_prompt_ratio, 0.07);
}

#[test]
fn a_hit_rate_below_what_history_gives_says_that_s_is_negative() {
    let error = solve(&workload(1000, 300, Some(0.1), 4, None)).unwrap_err();
    let Cause::HitRateTooLow { system_tokens, .. } = error.cause else { panic!("{error}") };
    assert!(system_tokens < 0.0);
    assert!(error.to_string().contains("below 0"), "{error}");
    assert_eq!(error.ways_out.hit_rate, Some(0.78));
}

#[test]
fn a_history_longer_than_the_isl_says_so() {
    let error = solve(&workload(100, 100, None, 5, None)).unwrap_err();
    assert!(matches!(error.cause, Cause::HistoryTooLong { history: 200.0, .. }), "{error}");
    assert_eq!(error.ways_out.isl, Some(203));
    assert_eq!(error.ways_out.osl, Some(48));
    assert_eq!(error.ways_out.num_turns, Some(2));
    assert_eq!((error.ways_out.hit_rate, error.ways_out.shared_system_prompt_ratio), (None, None));
}

#[test]
fn one_turn_with_nothing_shared_can_only_miss() {
    let spec = solve(&workload(1000, 100, Some(0.0), 1, Some(0.0))).unwrap();
    assert_eq!((spec.user_tokens_per_turn, spec.system_prompt_tokens), (1000, 0));
    assert_eq!(spec.feasible_hit_rate, Range { min: 0.0, max: 0.0 });
    let error = solve(&workload(1000, 100, Some(0.5), 1, Some(0.0))).unwrap_err();
    assert_eq!(error.cause, Cause::NothingToHit { hit_rate: 0.5 });
    assert_eq!(error.ways_out.shared_system_prompt_ratio, Some(0.5006));
    let spec = solve(&workload(1000, 100, Some(0.5), 1, None)).unwrap();
    assert_eq!(spec.effective_hit_rate, 0.5);
    assert_eq!(spec.shared_system_prompt_ratio, 0.52);
}

#[test]
fn without_a_hit_rate_it_is_the_natural_one_without_a_system_prompt() {
    let spec = solve(&Workload::default()).unwrap();
    assert_eq!((spec.user_tokens_per_turn, spec.system_prompt_tokens), (1000, 0));
    assert_eq!((spec.hit_rate, spec.effective_hit_rate), (0.0, 0.0));
    let spec = solve(&workload(1000, 100, None, 4, Some(0.5))).unwrap();
    assert_eq!((spec.user_tokens_per_turn, spec.system_prompt_tokens), (340, 0));
    assert_eq!(spec.effective_hit_rate, 0.66);
    assert!(spec.notices[0].contains("no effect"));
}

#[test]
fn everything_cached_is_never_feasible() {
    for turns in [1, 5, MAX_TURNS] {
        let error = solve(&workload(MAX_TOKENS, 10, Some(1.0), turns, Some(1.0))).unwrap_err();
        assert!(matches!(error.cause, Cause::HitRateTooHigh { .. }));
        assert_eq!((error.ways_out.isl, error.ways_out.num_turns), (None, None));
        assert_eq!(error.ways_out.hit_rate, Some(0.9999));
    }
}

#[test]
fn a_hit_rate_too_high_for_useful_messages_gets_the_smallest_share_there_is() {
    // 20 new tokens a turn: below 32 whatever is shared.
    let spec = solve(&workload(2000, 200, Some(0.99), 5, None)).unwrap();
    assert!(spec.shared_system_prompt_ratio > 0.9 && spec.user_tokens_per_turn >= 1, "{spec:?}");
    assert!(spec.notices[1].contains("very short"), "{:?}", spec.notices);
}

#[test]
fn a_field_out_of_bounds_is_refused_with_its_own_sentence() {
    let error = solve(&workload(0, 200, None, 5, None)).unwrap_err();
    assert_eq!(error.to_string(), "isl must be from 1 to 10000000, got 0");
    assert!(solve(&workload(10, 200, Some(f64::NAN), 5, None)).is_err());
    assert!(solve(&workload(10, 200, None, 0, None)).is_err());
}

#[test]
fn the_template_comes_off_the_messages_and_the_totals_stay() {
    let spec = solve(&workload(2000, 200, Some(0.85), 5, None)).unwrap();
    let cost = TemplateCost { first_turn_tokens: 26, later_turn_tokens: 11 };
    let tokens = message_tokens(&spec, cost).unwrap();
    assert_eq!(tokens, MessageTokens { system: 1486, shared_system: 150, first_user: 22, later_user: 22 });
    let cost = TemplateCost { first_turn_tokens: 40, later_turn_tokens: 33 };
    let error = message_tokens(&spec, cost).unwrap_err();
    assert!(error.to_string().contains("33 of each later one"), "{error}");
    // A session of one turn has no later one to be refused for.
    let spec = solve(&workload(30, 10, None, 1, None)).unwrap();
    let cost = TemplateCost { first_turn_tokens: 20, later_turn_tokens: 50 };
    assert_eq!(message_tokens(&spec, cost).unwrap().first_user, 10);
}

// What took a search as long as a plan's numbers are large would not come to an end here.
#[test]
fn the_largest_plans_are_solved_or_refused() {
    for isl in [1, MAX_TOKENS] {
        for osl in [1, 2000, MAX_TOKENS] {
            for turns in [1, 2, MAX_TURNS] {
                for hit_rate in [None, Some(0.0), Some(0.5), Some(1.0 - 1e-7), Some(1.0)] {
                    for ratio in [None, Some(0.0), Some(1e-9), Some(1.0)] {
                        let w = workload(isl, osl, hit_rate, turns, ratio);
                        solve(&w).map_or_else(|e| check_ways_out(&w, &e), |s| check_spec(&w, &s));
                    }
                }
            }
        }
    }
}

fn check_spec(w: &Workload, spec: &Spec) {
    let (u, s, n) = (spec.user_tokens_per_turn, spec.system_prompt_tokens, w.num_turns);
    assert!(u >= 1);
    assert_eq!(spec.shared_system_prompt + spec.unique_system_prompt, s);
    assert_eq!(spec.per_turn.len(), n as usize);
    let mut held = spec.shared_system_prompt;
    for (t, k) in spec.per_turn.iter().zip(1..) {
        assert_eq!((t.turn, t.total, t.cached), (k, planned_total(spec, k), held));
        assert_eq!((t.cached + t.new, t.cached_by_blocks % w.block_size), (t.total, 0));
        // A block less, and the reply's last token.
        assert!(t.cached - t.cached_by_blocks <= w.block_size && t.hit_rate < 1.0);
        held = t.total + w.osl;
    }
    let sum = |f: fn(&SpecTurn) -> u32| spec.per_turn.iter().map(|t| f64::from(f(t))).sum::<f64>();
    let near = |a: f64, b: f64| assert!((a - b).abs() <= 1e-9 * (1.0 + b.abs()), "{a} is not {b}");
    near(spec.effective_isl, sum(|t| t.total) / f64::from(n));
    near(spec.effective_hit_rate, sum(|t| t.cached) / sum(|t| t.total));
    near(spec.effective_hit_rate_by_blocks, sum(|t| t.cached_by_blocks) / sum(|t| t.total));
    assert!((spec.effective_isl - f64::from(w.isl)).abs() <= 0.5);
    let off = (spec.effective_hit_rate - spec.hit_rate).abs() * f64::from(w.isl);
    let has_room = f64::from(s) >= f64::from(n + 1) / 2.0 || w.shared_system_prompt_ratio.is_none();
    assert!(off <= if has_room { 0.501 } else { 1.0 }, "hit rate off by {off} tokens: {w:?}");
    if let Some(f) = w.shared_system_prompt_ratio {
        assert_eq!(spec.shared_system_prompt_ratio, f);
    }
}

fn check_ways_out(w: &Workload, error: &Infeasible) {
    let WaysOut { isl, osl, hit_rate, num_turns, shared_system_prompt_ratio } = error.ways_out;
    let works = |w: Workload| {
        let spec = solve(&w).unwrap_or_else(|e| panic!("suggested {w:?}: {e}"));
        check_spec(&w, &spec);
    };
    let fails = |w: Workload| assert!(solve(&w).is_err(), "nearer, and works: {w:?}");
    if let Some(isl) = isl {
        works(Workload { isl, ..w.clone() });
        fails(Workload { isl: if isl > w.isl { isl - 1 } else { isl + 1 }, ..w.clone() });
    }
    if let Some(osl) = osl {
        works(Workload { osl, ..w.clone() });
        fails(Workload { osl: if osl > w.osl { osl - 1 } else { osl + 1 }, ..w.clone() });
    }
    if let Some(num_turns) = num_turns {
        works(Workload { num_turns, ..w.clone() });
    }
    if let Some(h) = hit_rate {
        works(Workload { hit_rate: Some(h), ..w.clone() });
        let nearer = if h > w.hit_rate.unwrap_or(h) { h - 1.01e-4 } else { h + 1.01e-4 };
        fails(Workload { hit_rate: Some(nearer), ..w.clone() });
    }
    if let Some(f) = shared_system_prompt_ratio {
        works(Workload { shared_system_prompt_ratio: Some(f), ..w.clone() });
        fails(Workload { shared_system_prompt_ratio: Some(f - 1.01e-4), ..w.clone() });
    }
}

/// Token counts of all magnitudes, so that both answers are common.
fn tokens(most: u32) -> impl Strategy<Value = u32> {
    (0.0..f64::from(most).ln()).prop_map(|x: f64| whole_tokens(x.exp().round()).max(1))
}

fn any_workload() -> impl Strategy<Value = Workload> {
    let share =
        || prop::option::of(prop_oneof![3 => 0.0..=1.0, 1 => Just(0.0), 1 => Just(1.0), 1 => 0.9..=1.0]);
    (tokens(MAX_TOKENS), tokens(20_000), share(), tokens(200), share())
        .prop_map(|(isl, osl, h, n, f)| workload(isl, osl, h, n, f))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn a_solution_adds_up_and_an_infeasible_workload_names_only_what_solves(w in any_workload()) {
        match solve(&w) {
            Ok(spec) => check_spec(&w, &spec),
            Err(error) => check_ways_out(&w, &error),
        }
    }

    #[test]
    fn no_way_out_means_that_nothing_works(w in any_workload(), isl in tokens(MAX_TOKENS),
        osl in tokens(MAX_TOKENS), n in 1..300u32, h in 0.0..=1.0, f in 0.0..=1.0)
    {
        let Err(Infeasible { ways_out, .. }) = solve(&w) else { return Ok(()) };
        let tried = [
            (ways_out.isl.is_some(), Workload { isl, ..w.clone() }),
            (ways_out.osl.is_some(), Workload { osl, ..w.clone() }),
            (ways_out.num_turns.is_some(), Workload { num_turns: n, ..w.clone() }),
            (ways_out.hit_rate.is_some(), Workload { hit_rate: Some(h), ..w.clone() }),
            (ways_out.shared_system_prompt_ratio.is_some() || w.shared_system_prompt_ratio.is_none(),
                Workload { shared_system_prompt_ratio: Some(f), ..w.clone() }),
        ];
        for (named, other) in tried {
            prop_assert!(named || solve(&other).is_err(), "not named, and works: {:?}", other);
        }
    }

    #[test]
    fn the_feasible_ranges_are_exactly_what_solves(w in any_workload(), at in 0.0..=1.0_f64, out in 1e-6..1.0_f64) {
        let Ok(spec) = solve(&w) else { return Ok(()) };
        let solves_h = |h| solve(&Workload { hit_rate: Some(h), ..w.clone() }).is_ok();
        let Range { min, max } = spec.feasible_hit_rate;
        for h in [min, max, min + at * (max - min)] {
            prop_assert!(solves_h(h), "inside at {}", h);
        }
        prop_assert!(!solves_h(max + (out * (1.0 - max)).max(2e-6)));
        prop_assert!(min < 2e-6 || !solves_h(min - (out * min).max(2e-6)));
        let solves_f = |f| solve(&Workload { shared_system_prompt_ratio: Some(f), ..w.clone() }).is_ok();
        let Range { min, max } = spec.feasible_shared_system_prompt_ratio;
        for f in [min, max, min + at * (max - min), spec.shared_system_prompt_ratio] {
            prop_assert!(solves_f(f), "inside at {}", f);
        }
        // A difference of one token is the finest that the system prompt can show.
        prop_assert!(min < 0.01 || spec.system_prompt_tokens < 200 || !solves_f(min * (1.0 - out.max(1e-3))));
    }
}
