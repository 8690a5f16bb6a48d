//! What cannot be done is refused with one sentence and the exit code of its kind, and where that can be known
//! beforehand, before the server gets a single request.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

mod support;

use std::os::unix::fs::PermissionsExt;

use support::{FAST, Ran, Sim, benchctl, benchctl_with, closed_url};

/// A small run.
const SMALL: &str = "--tokenizer builtin -q";
/// Its conversations, unless others are given.
const SHORT: &str = "--isl 100 --osl 2";
const CLOSED: &str = "--concurrency 2 --num-sessions 2";

/// Runs against a server, with these words added.
fn run_at(url: &str, lines: &[&str]) -> Ran {
    let mut all = vec!["run -u", url, SMALL];
    if !lines.iter().any(|line| line.contains("--isl")) {
        all.push(SHORT);
    }
    all.extend_from_slice(lines);
    benchctl(&all)
}

/// The sentence of a run that is refused before the server is asked anything.
#[track_caller]
fn refused_unasked(code: i32, lines: &[&str]) -> String {
    let sim = Sim::start(&[FAST]);
    let ran = run_at(&sim.url, lines);
    let sentence = ran.sentence(code).to_owned();
    assert_eq!(sim.end().requests.len(), 0, "{lines:?} is refused before any request");
    sentence
}

#[track_caller]
fn says(sentence: &str, words: &[&str]) {
    for word in words {
        assert!(sentence.contains(word), "{word:?} is missing: {sentence}");
    }
    assert!(!sentence.contains("multiple times"), "the test itself gave a flag twice: {sentence}");
}

#[test]
fn a_url_where_nothing_listens_is_6() {
    let url = closed_url();
    let ran = run_at(&url, &["-m m", CLOSED]);
    says(ran.sentence(6), &["cannot reach", &url, "Connection refused", "--ready-timeout"]);
    let smoke = benchctl(&["smoke -u", &url]);
    says(smoke.sentence(6), &["cannot reach", &url]);
}

#[test]
fn a_server_that_never_gets_ready_is_6() {
    let sim = Sim::start(&["--loading-s 600"]);
    let ran = run_at(&sim.url, &["-m sim", CLOSED, "--ready-timeout 0.3"]);
    says(ran.sentence(6), &[&sim.url, "503", "Loading model"]);
}

#[test]
fn a_server_that_gets_ready_in_time_is_waited_for() {
    let sim = Sim::start(&[FAST, "--loading-s 0.5"]);
    let ran = run_at(&sim.url, &["-m sim", CLOSED, "--ready-timeout 60"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(sim.end().requests.iter().any(|line| line["status"] == 503), "it was asked while it was loading");
}

#[test]
fn an_unknown_model_is_8() {
    let sim = Sim::start(&[FAST]);
    says(run_at(&sim.url, &["-m other", CLOSED]).sentence(8), &["no model \"other\"", "it lists sim"]);
    says(benchctl(&["smoke -m other -u", &sim.url]).sentence(8), &["no model \"other\""]);
    assert_eq!(sim.end().turns.len(), 0);
}

#[test]
fn a_refused_key_is_7_and_is_not_repeated() {
    let sim = Sim::start(&[FAST, "--api-key open-sesame"]);
    let none = run_at(&sim.url, &[CLOSED]);
    says(none.sentence(7), &["refused the key with status 401", "--api-key-file"]);
    let wrong = run_at(&sim.url, &["-m sim --api-key sk-wrong", CLOSED]);
    says(wrong.sentence(7), &["401"]);
    assert!(!wrong.stderr.contains("sk-wrong"), "{}", wrong.stderr);
    let variable = [("OPENAI_API_KEY", "sk-wrong")];
    let line = ["smoke -m sim -u", &sim.url];
    says(benchctl_with(&variable, &line).sentence(7), &["401"]);
}

#[test]
fn the_right_key_gets_in_from_wherever_it_comes_and_is_saved_nowhere() {
    let sim = Sim::start(&[FAST, "--api-key open-sesame"]);
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "open-sesame\n").unwrap();
    let variables = |name| [(name, "open-sesame")];
    let (file, in_file) = (folder.path().join("r.json"), format!("--api-key-file {}", key.display()));
    let save = format!("--force --save-result {}", file.display());
    let run = |variables: &[(&str, &str)], more: &str| {
        let ran = benchctl_with(variables, &["run -u", &sim.url, SMALL, SHORT, CLOSED, &save, more]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let saved = std::fs::read_to_string(&file).unwrap();
        for text in [&ran.stdout, &ran.stderr, &saved] {
            assert!(!text.contains("open-sesame"), "{text}");
        }
    };
    run(&[], "--api-key open-sesame");
    run(&[], &in_file);
    run(&variables("OPENAI_API_KEY"), "");
    run(&variables("BENCHD_API_KEY"), "");
    let header = support::command("benchctl")
        .args(["smoke", "-u", &sim.url, "--header", "Authorization: Bearer open-sesame"])
        .output()
        .unwrap();
    assert_eq!(header.status.code(), Some(0), "{header:?}");
    let several = run_at(&sim.url, &[CLOSED, "--api-key open-sesame", &in_file]);
    says(several.sentence(2), &["give one of --api-key, --api-key-file"]);
}

#[test]
fn a_tokenizer_that_cannot_be_had_is_9() {
    let sim = Sim::start(&[FAST]);
    let cache = tempfile::tempdir().unwrap();
    let closed = closed_url();
    let offline = [("HF_ENDPOINT", closed.as_str()), ("HF_HOME", cache.path().to_str().unwrap())];
    let line = ["run -q -u", &sim.url, CLOSED, "--isl 100 --osl 2"];
    let with = |tokenizer: &str| benchctl_with(&offline, &[&line[..], &["--tokenizer", tokenizer]].concat());
    let named = with("nobody/nothing");
    says(named.sentence(9), &["nobody/nothing", &closed, "tokenizer.json", "--tokenizer builtin"]);
    let missing = with("/nonexistent/tokenizer.json");
    says(missing.sentence(9), &["/nonexistent/tokenizer.json"]);
    // A file that is no tokenizer.
    let file = cache.path().join("tokenizer.json");
    std::fs::write(&file, "{}").unwrap();
    says(with(file.to_str().unwrap()).sentence(9), &["tokenizer.json"]);
    assert_eq!(sim.end().turns.len(), 0);
}

#[test]
fn without_the_models_tokenizer_the_servers_own_is_taken_and_named() {
    let sim = Sim::start(&[FAST]);
    let cache = tempfile::tempdir().unwrap();
    let closed = closed_url();
    let offline = [("HF_ENDPOINT", closed.as_str()), ("HF_HOME", cache.path().to_str().unwrap())];
    let ran = benchctl_with(&offline, &["run -u", &sim.url, CLOSED, "--isl 100 --osl 2"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    says(&ran.stdout, &["tokenizer server", "the server's own tokenizer is used"]);
    assert!(sim.end().turns.iter().all(|line| line["prompt_tokens"] == 100));
}

#[test]
fn a_result_that_could_not_be_kept_is_10_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let existing = folder.path().join("precious.json");
    std::fs::write(&existing, "precious").unwrap();
    let save = |path: &str| format!("--save-result {path}");
    let (existing_path, folder_path) = (existing.to_str().unwrap(), folder.path().to_str().unwrap());
    says(&refused_unasked(10, &[CLOSED, &save(existing_path)]), &["exists", "--force"]);
    says(&refused_unasked(10, &[CLOSED, &save(folder_path)]), &["is a folder"]);
    says(&refused_unasked(10, &[CLOSED, &save("/nonexistent/r.json")]), &["cannot be written"]);
    if !rustix::process::geteuid().is_root() {
        // Nothing stops root.
        let closed = folder.path().join("closed");
        std::fs::create_dir(&closed).unwrap();
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o500)).unwrap();
        says(
            &refused_unasked(10, &[CLOSED, &save(closed.join("r.json").to_str().unwrap())]),
            &["cannot be written"],
        );
    }
    assert_eq!(std::fs::read_to_string(&existing).unwrap(), "precious");
}

#[test]
fn force_replaces_an_existing_result() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("r.json");
    std::fs::write(&file, "old").unwrap();
    let sim = Sim::start(&[FAST]);
    let ran = run_at(&sim.url, &[CLOSED, "--force --save-result", file.to_str().unwrap()]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(support::Saved::read(&file).count("/benchmark/total_requests"), 4);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left there");
}

#[test]
fn a_load_of_both_kinds_or_of_none_is_2() {
    says(
        &refused_unasked(2, &[CLOSED, "--request-rate 5 --duration 5"]),
        &["--concurrency", "--request-rate", "not both"],
    );
    says(&refused_unasked(2, &[]), &["--concurrency N", "--request-rate R"]);
    says(&refused_unasked(2, &["--concurrency 2"]), &["--num-sessions", "--duration", "--num-requests"]);
    says(&refused_unasked(2, &["--request-rate 5"]), &["--duration"]);
}

#[test]
fn a_warm_up_that_is_not_shorter_than_the_duration_is_2() {
    for warm_up in ["5", "6", "1e6"] {
        let load = format!("--request-rate 5 --duration 5 --warm-up {warm_up}");
        says(&refused_unasked(2, &[&load]), &["the warm-up must be shorter than the duration"]);
    }
}

#[test]
fn numbers_that_make_no_sense_are_2_and_named() {
    let sim = Sim::start(&[FAST]);
    for flag in [
        "--isl",
        "--osl",
        "--num-turns",
        "--first-chunk-threshold",
        "--block-size",
        "--concurrency",
        "--num-sessions",
        "--num-requests",
        "--num-workers",
    ] {
        for value in ["-1", "0", "nan", "1.5", "99999999999999999999999"] {
            let others =
                if flag == "--concurrency" { "--num-sessions 2" } else { "--concurrency 2 --num-sessions 2" };
            let others = if flag == "--num-sessions" { "--concurrency 2" } else { others };
            let line = ["run -q --tokenizer builtin", others, flag, value, "-u", &sim.url];
            says(benchctl(&line).sentence(2), &[flag]);
        }
    }
    for (flag, values) in [
        ("--hit-rate", &["-0.1", "1.1", "nan", "inf", "x"][..]),
        ("--shared-system-prompt-ratio", &["-0.1", "1.1", "nan"]),
        ("--think-time", &["-1", "nan", "1e300"]),
        ("--request-timeout", &["0", "-1", "nan", "1e300"]),
        ("--ready-timeout", &["-1", "nan"]),
        ("--drain-timeout", &["-1", "nan", "1e300"]),
        ("--ramp-interval", &["-2", "nan", "1e300"]),
        ("--warmup-jitter-max", &["-1", "nan"]),
        ("--seed", &["-1", "1.5", "99999999999999999999999"]),
    ] {
        for value in values {
            says(run_at(&sim.url, &[CLOSED, flag, value]).sentence(2), &[flag]);
        }
    }
    for (flag, values) in [
        ("--request-rate", &["0", "-5", "nan", "inf", "1e9"][..]),
        ("--duration", &["0", "-5", "nan", "1e300"]),
        ("--warm-up", &["-1", "nan"]),
        ("--max-concurrency", &["0", "-1", "nan"]),
        ("--max-in-flight", &["0", "-1"]),
    ] {
        for value in values {
            let others =
                [("--request-rate", "5"), ("--duration", "5")].into_iter().filter(|(name, _)| *name != flag);
            let others: Vec<&str> = others.flat_map(|(name, value)| [name, value]).collect();
            let line = [&others[..], &[flag, value]].concat();
            says(run_at(&sim.url, &line).sentence(2), &[flag]);
        }
    }
    for value in ["0", "-1", "nan"] {
        let load = "--request-rate 5 --duration 5 --arrival gamma --burstiness";
        says(run_at(&sim.url, &[load, value]).sentence(2), &["--burstiness"]);
    }
    assert_eq!(sim.end().requests.len(), 0);
}

/// The values that a refusal offers: flag and value.
fn ways_out(sentence: &str) -> Vec<(&'static str, String)> {
    let names = [
        ("isl ", "--isl"),
        ("osl ", "--osl"),
        ("hit rate ", "--hit-rate"),
        ("turns ", "--num-turns"),
        ("shared system prompt ratio ", "--shared-system-prompt-ratio"),
    ];
    let (_, offers) = sentence.split_once("changing one alone: ").unwrap_or_else(|| panic!("{sentence}"));
    let offers = offers.split(" (").next().unwrap();
    let offers = offers.split(", or ").map(|offer| {
        let (name, flag) =
            names.iter().find(|(name, _)| offer.starts_with(name)).unwrap_or_else(|| panic!("{offer}"));
        (*flag, offer[name.len()..].to_owned())
    });
    offers.collect()
}

#[test]
fn an_infeasible_workload_is_2_and_each_value_that_it_offers_works() {
    let asked = [
        ("--isl", "2000"),
        ("--osl", "200"),
        ("--hit-rate", "0.85"),
        ("--num-turns", "5"),
        ("--shared-system-prompt-ratio", "0"),
    ];
    let line = |change: Option<(&str, &str)>| {
        let value =
            |(name, value)| change.filter(|(flag, _)| *flag == name).map_or((name, value), |change| change);
        asked
            .into_iter()
            .map(value)
            .map(|(name, value)| format!("{name} {value}"))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let sentence = refused_unasked(2, &[CLOSED, &line(None)]);
    says(&sentence, &["infeasible workload", "hit rate of 0.85 is too high", "ratio of 0"]);
    let offers = ways_out(&sentence);
    assert_eq!(offers.len(), 5, "one for each parameter: {sentence}");
    assert_eq!(benchctl(&["plan", &line(None)]).sentence(2), sentence, "plan says the same without a server");
    for (flag, value) in &offers {
        let works = |value: &str| {
            let ran = benchctl(&["plan", &line(Some((*flag, value)))]);
            assert!(matches!(ran.code, Some(0 | 2)), "{ran:?}");
            ran.code == Some(0)
        };
        assert!(works(value), "{flag} {value}");
        // Nearest: a step back towards what was asked fails.
        let is_whole = !value.contains('.');
        let step = if is_whole { 1.0 } else { 0.001 };
        let asked: f64 = asked.iter().find(|(name, _)| name == flag).unwrap().1.parse().unwrap();
        let offered: f64 = value.parse().unwrap();
        let back = offered + if asked > offered { step } else { -step };
        assert!(
            !works(&back.to_string()),
            "{flag} {back} works too, which is nearer to {asked} than {value}"
        );
    }
}

#[test]
fn a_template_that_leaves_no_room_is_2_and_its_cost_is_named() {
    let sim = Sim::start(&[FAST, "--template-request 40 --template-message 30 --template-reply 30"]);
    let ran = run_at(&sim.url, &[CLOSED, "--isl 60"]);
    says(ran.sentence(2), &["chat template takes 100 tokens of the first turn", "raise the ISL"]);
    assert_eq!(sim.end().turns.len(), 0);
}

#[test]
fn a_server_that_refuses_every_form_of_a_request_is_5_with_its_own_words() {
    let sim = Sim::start(&[FAST, "--reject model"]);
    says(run_at(&sim.url, &["-m sim", CLOSED]).sentence(5), &["400", "'model' is not supported"]);
}

#[test]
fn a_parameter_that_the_server_refuses_is_dropped_and_named() {
    for parameter in ["ignore_eos", "min_tokens", "temperature", "max_tokens", "stream_options"] {
        let sim = Sim::start(&[FAST, "--reject", parameter]);
        let ran = run_at(&sim.url, &["-m sim", CLOSED]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        says(&ran.stdout, &[parameter]);
        let truth = sim.end();
        assert!(
            truth.turns.iter().all(|line| line["status"] == 200 && line["max_tokens"] == 2),
            "{parameter}"
        );
    }
}
