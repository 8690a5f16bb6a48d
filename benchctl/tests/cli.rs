//! The real binary, as far as it goes without benchd: help, wrong arguments, places that cannot be written.

// Helpers of tests are not recognised as tests.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

/// Runs benchctl with siblings that must not be started.
fn benchctl(line: &str) -> Output {
    let words = shlex::split(line).unwrap();
    Command::new(env!("CARGO_BIN_EXE_benchctl"))
        .args(words)
        .env("BENCHD_BIN", "/nonexistent/benchd")
        .env("BENCHSIM_BIN", "/nonexistent/benchsim")
        .env_remove("OPENAI_BASE_URL")
        .env_remove("OPENAI_API_KEY")
        .env_remove("BENCHD_API_KEY")
        .output()
        .unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The one sentence that a wrong command line gets.
fn refusal(line: &str, code: i32) -> String {
    let output = benchctl(line);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{line}: {text}");
    assert!(output.stdout.is_empty(), "{line}");
    assert_eq!(text.lines().count(), 1, "{line}: {text}");
    text.strip_prefix("benchctl: ").unwrap_or_else(|| panic!("{line}: {text}")).trim_end().to_owned()
}

const CLOSED: &str = "-u http://127.0.0.1:9 -m m --concurrency 2 --num-sessions 4";

#[test]
fn help_names_every_flag() {
    insta::assert_snapshot!(benchctl::args::help());
    let output = benchctl("--help");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    for flag in ["--first-chunk-threshold", "--hit-rate", "--save-result", "--sim", "Exit codes"] {
        assert!(text.contains(flag), "{flag}");
    }
}

#[test]
fn no_arguments_at_all_get_the_help() {
    let output = benchctl("");
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--concurrency"));
}

#[test]
fn wrong_arguments_get_one_sentence_and_code_2() {
    for (line, want) in [
        ("-i", "not in this version"),
        ("-i --client --cmd 'rate 10'", "not in this version"),
        ("run", "no server was named"),
        ("run --sim --isl -5", "'--isl <TOKENS>': must be a whole number"),
        ("run --sim --isl abc", "'--isl <TOKENS>': must be a whole number"),
        ("run --sim --request-rate nan", "must be a number"),
        ("run --sim --request-rate 1e9 --duration 5", "--request-rate must be above 0 and at most 1000000"),
        ("run --sim --request-rate 5 --concurrency 8", "not both"),
        ("run -u http://127.0.0.1:9", "give --concurrency N"),
        ("run --sim --request-rate 5 --duration 5 --warm-up 5", "shorter than the duration"),
        (
            "run --sim --concurrency 5 --num-sessions 9 --warm-up 5",
            "--warm-up does not go with --concurrency",
        ),
        ("run --sim='it''s \"open'", "quotes"),
        ("-u localhost:8000 --concurrency 5 --num-sessions 9", "must start with http://"),
        ("run --sim --strict=server", "'--strict[=<KIND>]'"),
        ("smoke --isl 5", "unexpected argument '--isl'"),
        ("-s -u http://127.0.0.1:9 --isl 5", "-s sends one small request"),
        ("plan --isl 0", "--isl must be from 1 to 10000000, got 0"),
    ] {
        let text = refusal(line, 2);
        assert!(text.contains(want), "{line}: {text}");
    }
}

#[test]
fn a_place_that_cannot_be_written_is_found_out_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let existing = dir.path().join("r.json");
    std::fs::write(&existing, "precious").unwrap();
    let save = |path: &Path| refusal(&format!("{CLOSED} --save-result {}", path.display()), 10);
    assert!(save(&existing).contains("exists"));
    assert!(save(&dir.path().join("no/r.json")).contains("cannot be written"));
    assert!(save(dir.path()).contains("is a folder"));
    let saved_dir = refusal(&format!("{CLOSED} --save-dir {}/no", dir.path().display()), 10);
    assert!(saved_dir.contains("cannot be written"), "{saved_dir}");
    assert_eq!(std::fs::read_to_string(&existing).unwrap(), "precious");
    // With --force the next thing that is missing is benchd.
    let forced = refusal(&format!("{CLOSED} --force --save-result {}", existing.display()), 1);
    assert!(forced.contains("BENCHD_BIN names /nonexistent/benchd"), "{forced}");
    assert_eq!(std::fs::read_to_string(&existing).unwrap(), "precious");
}

/// A sibling that does what `SIBLING_SCRIPT` says.
const SIBLING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sibling.sh");

#[test]
fn a_simulator_that_refuses_its_options_is_quoted() {
    let output = Command::new(env!("CARGO_BIN_EXE_benchctl"))
        .args(["run", "--quiet", "--sim=--bogus"])
        .env("BENCHSIM_BIN", SIBLING)
        .env("SIBLING_SCRIPT", "echo \"error: no such thing: $4\" >&2; exit 2")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let want = "benchctl: benchsim ended before it was ready (exit code 2): error: no such thing: --bogus\n";
    assert_eq!(stderr(&output), want);
}

/// A benchd that says what it was given, then ends.
fn run_with_a_benchd_that_tells(line: &str, script: &str) -> (Output, String) {
    let dir = tempfile::tempdir().unwrap();
    let told = dir.path().join("told");
    let output = Command::new(env!("CARGO_BIN_EXE_benchctl"))
        .args(shlex::split(line).unwrap())
        .env("BENCHD_BIN", SIBLING)
        .env("SIBLING_SCRIPT", format!("exec >\"$TOLD\" 2>&1\n{script}"))
        .env("TOLD", &told)
        .env("OPENAI_API_KEY", "sk-from-env")
        .env_remove("BENCHD_API_KEY")
        .output()
        .unwrap();
    (output, std::fs::read_to_string(told).unwrap_or_default())
}

#[test]
#[cfg(target_os = "linux")] // reads /proc
fn secrets_reach_benchd_by_its_standard_input_alone() {
    let script =
        "read line; echo \"stdin: $line\"; echo \"args: $*\"; tr '\\0' ' ' </proc/$PPID/cmdline; echo; env";
    let line = format!("{CLOSED} --api-key sk-secret --header 'Cookie: sk-biscuit' --header 'X-Team: blue'");
    let (output, told) = run_with_a_benchd_that_tells(&line, script);
    assert_eq!(output.status.code(), Some(1), "it has ended before it was ready");
    assert!(stderr(&output).contains("benchd ended before it was ready"), "{}", stderr(&output));
    let (stdin, rest) = told.split_once('\n').unwrap();
    assert_eq!(stdin, r#"stdin: {"api_key":"sk-secret","headers":[["Cookie","sk-biscuit"]]}"#);
    assert!(rest.contains("--private --socket"), "{rest}");
    assert!(rest.contains("--header=X-Team: blue"), "{rest}");
    assert!(!rest.contains("sk-"), "neither in benchctl's arguments nor in benchd's environment: {rest}");
}

#[test]
fn a_key_variable_is_taken_when_nothing_else_is_given() {
    let (_, told) = run_with_a_benchd_that_tells(CLOSED, "read line; echo \"$line\"; env");
    assert!(told.starts_with(r#"{"api_key":"sk-from-env"}"#), "{told}");
    assert_eq!(told.matches("sk-from-env").count(), 1, "{told}");
}

#[test]
fn the_folder_of_a_benchd_that_failed_is_gone() {
    let (_, told) = run_with_a_benchd_that_tells(CLOSED, "echo \"$3\"; exit 1");
    let socket = Path::new(told.trim());
    assert!(socket.is_absolute() && !socket.parent().unwrap().exists(), "{told}");
}
