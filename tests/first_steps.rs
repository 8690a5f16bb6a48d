//! What a newcomer does first: a smoke request, a plan without a server, a benchmark of the simulator.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{FAST, Sim, TEMPLATE, benchctl, near};

#[test]
fn a_smoke_request_to_the_simulator_says_what_it_can_do() {
    for line in ["smoke --sim", "-s --sim"] {
        let ran = benchctl(&[line]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        for word in [
            "TTFT",
            "latency",
            "16 in, 16 out",
            "models    sim",
            "usage",
            "cached tokens",
            "/metrics",
            "/tokenize",
        ] {
            assert!(ran.stdout.contains(word), "{word}: {}", ran.stdout);
        }
    }
}

#[test]
fn a_smoke_requests_json_has_the_figures_that_the_simulator_logged() {
    let sim = Sim::start(&["--ttft-ms 80 --itl-ms 10 --prefill-us-per-token 0"]);
    let ran = benchctl(&["smoke --json -u", &sim.url]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let smoke: Value = serde_json::from_str(&ran.stdout).unwrap();
    let truth = sim.end();
    let line = truth.requests.iter().rfind(|line| line["path"] == "/v1/chat/completions").unwrap();
    assert_eq!(smoke["input_tokens"], line["prompt_tokens"]);
    assert_eq!(smoke["output_tokens"], line["completion_tokens"]);
    let took = |name: &str| (line[name].as_f64().unwrap() - line["first_byte_ns"].as_f64().unwrap()) / 1e6;
    let (ttft, latency) = (smoke["ttft_ms"].as_f64().unwrap(), smoke["latency_ms"].as_f64().unwrap());
    // Never before the simulator, and not much later, even in a debug build on a busy machine.
    for (measured, took) in [(ttft, took("first_write_ns")), (latency, took("last_write_ns"))] {
        assert!((1.0..2.0).contains(&(measured / took)), "{measured} ms for {took} ms");
    }
    assert_eq!((&smoke["models"], &smoke["has_usage"]), (&serde_json::json!(["sim"]), &true.into()));
}

#[test]
fn a_smoke_request_tells_what_a_server_lacks() {
    let sim = Sim::start(&[FAST, "--no-usage --reject ignore_eos"]);
    let ran = benchctl(&["smoke --json -u", &sim.url]);
    let smoke: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((&smoke["has_usage"], &smoke["has_cached_tokens"]), (&false.into(), &false.into()));
    assert!(smoke["input_tokens"].is_null(), "not known, which is not 0");
    assert!(smoke["dropped_parameters"][0].as_str().unwrap().contains("ignore_eos"), "{smoke}");
}

#[test]
fn a_plan_needs_no_server_and_adds_up() {
    let workload = "--isl 1000 --osl 64 --hit-rate 0.7 --num-turns 4 --shared-system-prompt-ratio 0.5";
    let text = benchctl(&["plan", workload]);
    assert_eq!(text.code, Some(0), "{text:?}");
    assert!(
        text.stdout.contains("u = 272 new user tokens a turn, s = 224 system prompt tokens"),
        "{}",
        text.stdout
    );
    let json = benchctl(&["plan --json", workload]);
    let spec: Value = serde_json::from_str(&json.stdout).unwrap();
    let turns = spec["per_turn"].as_array().unwrap();
    let sum = |name: &str| turns.iter().map(|turn| turn[name].as_f64().unwrap()).sum::<f64>();
    near(sum("total") / 4.0, 1000.0, 0.5, "ISL");
    near(sum("cached") / sum("total"), 0.7, 0.001, "hit rate");
    assert_eq!(sum("cached") + sum("new"), sum("total"));
}

#[test]
fn a_ratio_that_was_not_given_is_raised_with_a_notice() {
    let ran = benchctl(&["plan --isl 2000 --osl 200 --hit-rate 0.85 --num-turns 5"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.contains("raised from its default 0 to 0.11"), "{}", ran.stdout);
    assert!(ran.stdout.contains("u = 33 new user tokens"), "{}", ran.stdout);
}

#[test]
fn a_run_on_the_simulator_prints_a_report_and_says_what_to_do_next() {
    let sim = format!("--sim={}", [TEMPLATE, FAST].join(" "));
    let ran = support::command("benchctl")
        .args(["run", &sim, "--concurrency", "4", "--num-sessions", "8", "--isl", "200", "--osl", "8"])
        .output()
        .unwrap();
    let ran = support::Ran::from(ran);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let first = ran.stdout.lines().next().unwrap();
    assert!(first.starts_with("verdict: "), "{first}");
    let last = ran.stdout.lines().last().unwrap();
    assert!(last.contains("--save-result results.json"), "{last}");
    for word in ["Workload", "Requests: 12 =", "Load", "Hit rate", "Latency (ms", "TTFT", "TPOT", "ITL"] {
        assert!(ran.stdout.contains(word), "{word}: {}", ran.stdout);
    }
}

#[test]
fn a_runs_json_is_the_report_alone() {
    let sim = Sim::start(&[FAST]);
    let load = "--concurrency 4 --num-sessions 8 --isl 200 --osl 8 --tokenizer builtin";
    let ran = benchctl(&["run --json -u", &sim.url, load]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["benchmark"]["total_requests"], 12);
    assert_eq!(report["schema_version"], 1);
    assert!(report.get("raw_metrics").is_none());
}

#[test]
fn strict_makes_a_suspect_result_a_failure() {
    // The only session's requests are all warm-up, which is a reason of the load's kind.
    let sim = Sim::start(&[FAST]);
    let load = "--concurrency 4 --num-sessions 1 --isl 200 --osl 8 --num-turns 3 --tokenizer builtin";
    assert_eq!(benchctl(&["run -u", &sim.url, load]).code, Some(0));
    assert_eq!(benchctl(&["run --strict -u", &sim.url, load]).code, Some(3));
}
