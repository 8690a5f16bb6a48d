//! The file that `benchctl run --save-result` writes, against its published schema and the full list of its names.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use jsonschema::Validator;
use serde_json::{Map, Value, json};

const SCHEMA: &str = include_str!("../../proto/result.schema.json");

/// A closed loop with what closed loops alone have, and with the records' events.
static CLOSED: LazyLock<Value> = LazyLock::new(|| {
    saved(
        "run --sim='--itl-ms 1' --concurrency 2 --num-sessions 8 --num-turns 2 --isl 120 --osl 20 --save-events \
         --extra-body '{\"user\":\"x\"}'",
    )
});

/// An open loop in which the server is too slow, so that slots are refused, and takes no prompt of turn 3.
static OPEN: LazyLock<Value> = LazyLock::new(|| {
    saved(
        "run --sim='--max-model-len 185 --slots 2 --ttft-ms 60' --request-rate 60 --duration 1.5 --arrival gamma \
         --burstiness 0.5 --warm-up 0.2 --num-turns 3 --isl 120 --osl 20 --max-in-flight 4 --max-concurrency 50",
    )
});

/// What a run with these arguments saves.
fn saved(line: &str) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("result.json");
    let output = Command::new(env!("CARGO_BIN_EXE_benchctl"))
        .args(shlex::split(line).unwrap())
        .args(["--quiet", "--seed", "7", "--save-result"])
        .arg(&file)
        .env_remove("BENCHD_BIN")
        .env_remove("BENCHSIM_BIN")
        .env_remove("OPENAI_API_KEY")
        .env_remove("BENCHD_API_KEY")
        .output()
        .unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    read(&file)
}

fn read(file: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

fn validator() -> Validator {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    jsonschema::draft202012::new(&schema).unwrap()
}

/// What is wrong with a file, each with its place.
fn faults(file: &Value) -> Vec<String> {
    validator().iter_errors(file).map(|e| format!("{}: {e}", e.instance_path())).collect()
}

#[test]
fn the_schema_is_one() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    assert!(jsonschema::meta::is_valid(&schema));
}

#[test]
fn a_saved_closed_loop_is_valid_against_the_schema() {
    assert_eq!(faults(&CLOSED), [""; 0]);
    assert_eq!(CLOSED["config"]["mode"], "closed");
    assert_eq!(CLOSED["config"]["extra_body"]["user"], "x");
    let rows = CLOSED["raw_metrics"].as_array().unwrap();
    assert_eq!(rows.len() as u64, CLOSED["benchmark"]["total_requests"].as_u64().unwrap());
    assert!(rows.iter().all(|row| row["event_tokens"].as_array().unwrap().len() == 20));
}

#[test]
fn a_saved_open_loop_with_failures_and_refused_slots_is_valid_against_the_schema() {
    assert_eq!(faults(&OPEN), [""; 0]);
    assert_eq!(OPEN["config"]["mode"], "open");
    let outcomes: BTreeSet<&str> =
        OPEN["raw_metrics"].as_array().unwrap().iter().map(|row| row["outcome"].as_str().unwrap()).collect();
    assert_eq!(outcomes, ["http_status", "ok", "refused"].into());
    assert_ne!(OPEN["failures"]["total"], 0);
    assert_eq!(OPEN["verdict"]["trust"], "suspect");
}

#[test]
fn a_reader_tolerates_fields_that_it_does_not_know() {
    let mut file = CLOSED.clone();
    file["new"] = json!(1);
    file["stats"]["new"] = json!("x");
    file["raw_metrics"][0]["new"] = json!(null);
    assert_eq!(faults(&file), [""; 0]);
}

#[test]
fn a_file_with_a_value_of_the_wrong_type_is_not_valid() {
    for place in [
        "/schema_version",
        "/verdict/trust",
        "/config/concurrency",
        "/spec/per_turn/0/total",
        "/first_chunk_threshold",
        "/benchmark/duration_s",
        "/stats/p99_ttft_ms",
        "/stats/count_itl",
        "/stats/ci95_low_avg_ttft_ms",
        "/per_turn/1/avg_latency_ms",
        "/load/turn_mix/0/sent",
        "/hit_rate/planned",
        "/server/window/ttft_count",
        "/server_samples/0/at_ms",
        "/failures/total",
        "/preparation/template/first_turn_tokens",
        "/environment/cpus",
        "/raw_metrics/3/due_ms",
        "/raw_metrics/3/ttft_ms",
        "/raw_metrics/3/outcome",
        "/raw_metrics/3/event_gaps_ms/0",
    ] {
        let mut file = CLOSED.clone();
        *file.pointer_mut(place).unwrap_or_else(|| panic!("{place}")) = json!("12");
        // At the place itself, or at the choice that it belongs to.
        let top = &place[..place[1..].find('/').map_or(place.len(), |end| end + 1)];
        let faults = faults(&file);
        assert!(faults.iter().any(|fault| fault.starts_with(top)), "{place}: {faults:?}");
    }
}

#[test]
fn a_file_without_a_field_is_not_valid() {
    for (place, field) in [
        ("", "verdict"),
        ("", "raw_metrics"),
        ("/config", "concurrency"),
        ("/config", "mode"),
        ("/spec/per_turn/0", "cached_by_blocks"),
        ("/benchmark", "measured_s"),
        ("/stats", "p95_fc_ms"),
        ("/per_turn/0", "count"),
        ("/load", "residuals"),
        ("/hit_rate", "reported_missing"),
        ("/environment", "plan_hash"),
        ("/raw_metrics/0", "fc_ms"),
    ] {
        let mut file = CLOSED.clone();
        let object = file.pointer_mut(place).and_then(Value::as_object_mut).unwrap();
        assert!(object.remove(field).is_some(), "{place}/{field}");
        assert!(!faults(&file).is_empty(), "{place}/{field}");
    }
}

#[test]
fn a_missing_value_is_null_and_where_it_cannot_be_missing_null_is_not_valid() {
    let mut file = CLOSED.clone();
    file["stats"]["p99_fc_ms"] = json!(null);
    file["raw_metrics"][0]["fc_ms"] = json!(null);
    assert_eq!(faults(&file), [""; 0]);
    file["stats"]["count_fc"] = json!(null);
    file["raw_metrics"][0]["due_ms"] = json!(null);
    assert_eq!(faults(&file).len(), 2);
}

/// Names in a blank-separated list, where `{a,b}_x` stands for `a_x b_x`.
fn names(lists: &str) -> BTreeSet<String> {
    lists.split_whitespace().flat_map(expand).collect()
}

fn expand(word: &str) -> Vec<String> {
    let Some((before, rest)) = word.split_once('{') else { return vec![word.to_owned()] };
    let (choices, after) = rest.split_once('}').unwrap();
    choices.split(',').flat_map(|choice| expand(&format!("{before}{choice}{after}"))).collect()
}

fn keys(object: &Value) -> BTreeSet<String> {
    object.as_object().unwrap().keys().cloned().collect()
}

const LATENCIES: &str =
    "{ttft,ttfo,fc,tpot,icl,itl,latency,dispatch_lag,cap_wait,ttft_from_due,fc_from_due,latency_from_due}";

// Scripts read these names: one may be added here, none may go.
#[test]
fn a_saved_file_has_these_names() {
    let stats = format!(
        "{{avg,p50,p90,p95,p99,max}}_{LATENCIES}_ms count_{LATENCIES} \
         ci95_{{low,high}}_{{avg,p50,p90,p95,p99}}_{{ttft,tpot,latency}}_ms throughput_tok_s input_throughput_tok_s \
         measured_request_rate avg_input_tokens avg_output_tokens avg_reasoning_tokens error_rate"
    );
    let row = "session_id turn phase outcome http_status error due_ms sent_ms start_time_ms completed_ms cap_wait_ms \
               dispatch_lag_ms ttft_ms ttfo_ms fc_ms tpot_ms itl_ms latency_ms input_tokens input_tokens_source \
               planned_input_tokens output_tokens output_tokens_source cached_tokens expected_cached_tokens \
               reply_tokens reasoning_tokens events reads is_whole finish_reason new_connection resent";
    let load = "planned_slots sent refused unsent unanswered asked_rate_per_s planned_rate_per_s sent_rate_per_s planned_isl \
                achieved_isl planned_osl achieved_osl exact_prompts residuals uncounted_prompts turn_mix \
                sessions_{started,completed,failed,beyond_plan,cut_short} ready_wait_ms mean_in_flight peak_in_flight \
                in_flight_growth_per_s prompt_supply_dry new_connections resent";
    let change =
        "from_ms to_ms prompt_tokens generation_tokens cache_queries cache_hits ttft_count avg_ttft_ms";
    let config = "url model tokenizer tokenizer_sha256 mode seed request_timeout_s drain_timeout_s";
    for (place, want) in [
        (
            "",
            "schema_version verdict config spec first_chunk_threshold benchmark stats per_turn load hit_rate stream client failures \
             preparation histograms environment server server_samples raw_metrics",
        ),
        ("/verdict", "trust reasons"),
        (
            "/spec",
            "isl osl hit_rate hit_rate_given num_turns shared_system_prompt_ratio shared_system_prompt_ratio_given \
             think_time_s block_size user_tokens_per_turn system_prompt_tokens shared_system_prompt \
             unique_system_prompt effective_isl effective_hit_rate effective_hit_rate_by_blocks feasible_hit_rate \
             feasible_shared_system_prompt_ratio per_turn notices",
        ),
        ("/spec/feasible_hit_rate", "min max"),
        ("/spec/per_turn/0", "turn total cached new hit_rate cached_by_blocks"),
        (
            "/benchmark",
            "{total,warmup,measured,drain,failed,refused,aborted}_requests duration_s measured_s is_partial \
             error_limit_reached steady_state_reached statistics_of_all",
        ),
        ("/stats", &stats),
        (
            "/per_turn/0",
            "turn count avg_isl {avg,p50,p99}_{ttft,fc,tpot,itl,latency}_ms count_{ttft,fc,tpot,itl,latency}",
        ),
        ("/load", load),
        ("/load/turn_mix/0", "turn sent planned achieved"),
        ("/load/ready_wait_ms", "count avg p99"),
        (
            "/hit_rate",
            "planned planned_by_blocks expected expected_by_blocks reported reported_missing reported_requests \
             first_turn_unexpected counted counted_missing counted_from_ms counted_to_ms counted_whole_run \
             reported_whole_run",
        ),
        ("/failures", "total kinds"),
        ("/preparation", "dropped_parameters template calibration notices"),
        ("/preparation/template", "first_turn_tokens later_turn_tokens"),
        (
            "/preparation/calibration/0",
            "purpose turns with_system content_tokens prompt_tokens cached_tokens status",
        ),
        (
            "/server",
            "metrics_url kind missing scrapes failed_scrapes last_failure window whole_run own_prompt_tokens \
             own_cached_tokens",
        ),
        ("/server/whole_run", change),
        (
            "/server/window",
            &format!("{change} samples running waiting kv_cache_usage client_ttft_count client_avg_ttft_ms"),
        ),
        ("/server/window/running", "mean max"),
        (
            "/server_samples/0",
            "at_ms running waiting kv_cache_usage prompt_tokens generation_tokens cache_queries cache_hits ttft_count \
             ttft_sum_s",
        ),
        ("/histograms", &format!("{LATENCIES}_us")),
        (
            "/environment",
            "benchd_version protocol_version host os cpus command_line seed plan_hash started_at_epoch_s \
             origin_monotonic_ns",
        ),
    ] {
        for (which, file) in [("closed", &*CLOSED), ("open", &*OPEN)] {
            assert_eq!(keys(file.pointer(place).unwrap()), names(want), "{which}: {place}");
        }
    }
    let closed = format!("{config} concurrency num_sessions warmup_jitter_max_s extra_body");
    assert_eq!(keys(&CLOSED["config"]), names(&closed));
    let open =
        format!("{config} request_rate_per_s duration_s warm_up_s arrival max_concurrency max_in_flight");
    assert_eq!(keys(&OPEN["config"]), names(&open));
    assert_eq!(keys(&CLOSED["raw_metrics"][0]), names(&format!("{row} event_gaps_ms event_tokens")));
    assert_eq!(keys(&OPEN["raw_metrics"][0]), names(row));
    assert_eq!(
        keys(&OPEN["failures"]["kinds"][0]),
        names("outcome http_status count rate by_phase by_turn samples")
    );
    assert_eq!(keys(&OPEN["verdict"]["reasons"][0]), names("kind code text"));
}

/// Every name that a definition of the schema has, or what it refers to.
fn described(schema: &Value, at: &Value) -> Map<String, Value> {
    let at = match at.get("$ref").and_then(Value::as_str) {
        Some(reference) => schema.pointer(&reference[1..]).unwrap(),
        None => at,
    };
    let mut all = at.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
    for branch in at.get("oneOf").and_then(Value::as_array).into_iter().flatten() {
        all.extend(branch["properties"].as_object().unwrap().clone());
    }
    all
}

#[test]
fn the_schema_describes_every_name_that_is_written() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let mut left =
        vec![(String::new(), schema.clone(), CLOSED.clone()), (String::new(), schema.clone(), OPEN.clone())];
    while let Some((place, at, value)) = left.pop() {
        let known = described(&schema, &at);
        for (name, value) in value.as_object().into_iter().flatten() {
            let Some(at) = known.get(name) else {
                // The server's own words, and maps from data.
                let maps = "/histograms /load/residuals /config/extra_body /failures/kinds/by_phase /failures/kinds/by_turn";
                assert!(maps.split(' ').any(|map| map == place), "{place}/{name}");
                continue;
            };
            assert!(at.get("description").or(at.get("$ref")).or(at.get("const")).is_some(), "{place}/{name}");
            let (at, value) = match value.as_array().and_then(|list| list.first()) {
                Some(first) => (definition(&schema, at)["items"].clone(), first.clone()),
                None => (definition(&schema, at).clone(), value.clone()),
            };
            left.push((format!("{place}/{name}"), at, value));
        }
    }
}

/// What a place of the schema says, through a reference or a "… or null".
fn definition<'a>(schema: &'a Value, at: &'a Value) -> &'a Value {
    let at = at.get("anyOf").map_or(at, |choices| &choices[0]);
    match at.get("$ref").and_then(Value::as_str) {
        Some(reference) => schema.pointer(&reference[1..]).unwrap(),
        None => at,
    }
}
