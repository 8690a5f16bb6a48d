//! What streams become, without a network: the corpus, any cutting of it, and the work that decoding takes.

use std::path::Path;

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::*;

/// Bodies of answers, and beside each what it must become.
const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/engine/corpus");

/// Takes a body as it would come in these pieces.
fn replay<'a>(pieces: impl IntoIterator<Item = &'a [u8]>, says_json: bool) -> (Result<(), Broken>, Observed) {
    let mut seen = Observed::new(0, 0);
    let pieces: Vec<&[u8]> = pieces.into_iter().collect();
    let beginnings = (0..=pieces.len()).map(|n| (n, pieces[..n].concat()));
    let told = beginnings.take(100).find_map(|(n, first)| Some((n, Form::of(&first, says_json)?)));
    let (read, form) = told.unwrap_or((0, Form::by_header(says_json)));
    let taken = match form {
        Form::Whole => seen.take_whole(&pieces.concat(), 0, 1),
        Form::Page => Err((Outcome::Decode, beginning_of(&pieces.concat()))),
        Form::Stream => {
            let mut intake = Intake::new(1);
            let first = pieces[..read].concat();
            let rest = pieces[read..].iter().copied();
            let mut reads = (0..).zip(std::iter::once(first.as_slice()).chain(rest));
            let fed = reads.try_for_each(|(at_ns, read)| intake.take(read, at_ns, &mut seen));
            fed.and_then(|()| intake.end(&seen))
        }
    };
    (taken, seen)
}

/// What became of it, in the form of the corpus; a failure's text is compared by a part of it.
fn said((taken, seen): &(Result<(), Broken>, Observed), expected_error: Option<&str>) -> Value {
    let (outcome, error) = match taken {
        Ok(()) if seen.is_empty() => (Outcome::Empty, None),
        Ok(()) => (Outcome::Ok, None),
        Err((outcome, text)) => (*outcome, Some(text.as_str())),
    };
    let error = match (error, expected_error) {
        (Some(text), Some(part)) if text.contains(part) => Some(part),
        (error, _) => error,
    };
    let usage = seen.usage.map(|usage| {
        json!({
            "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens, "cached_tokens": usage.cached_tokens,
        })
    });
    json!({
        "outcome": outcome.name(), "error": error, "answer": seen.text.answer, "other": seen.text.other,
        "events": seen.events, "usage": usage, "finish_reason": seen.finish_reason,
    })
}

/// Name, body and expectation of each.
fn corpus() -> Vec<(String, Vec<u8>, Value)> {
    let files = std::fs::read_dir(CORPUS).unwrap().map(|entry| entry.unwrap().path());
    let bodies = files.filter(|path| path.extension().is_some_and(|extension| extension == "sse"));
    let read = |path: &Path| std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let entry = |path: std::path::PathBuf| {
        let expected = serde_json::from_slice(&read(&path.with_extension("json"))).unwrap();
        (path.file_stem().unwrap().to_string_lossy().into_owned(), read(&path), expected)
    };
    bodies.map(entry).collect()
}

#[test]
fn every_stream_of_the_corpus_becomes_what_it_must_in_whatever_pieces_it_comes() {
    let corpus = corpus();
    assert!(corpus.len() >= 40, "{}", corpus.len());
    for (name, body, expected) in corpus {
        let error = expected["error"].as_str();
        assert_eq!(said(&replay([body.as_slice()], false), error), expected, "{name}");
        for size in [1, 2, 3, 5, 7, 64, 1000] {
            assert_eq!(said(&replay(body.chunks(size), false), error), expected, "{name} by {size} bytes");
        }
        for cut in 0..body.len().min(3000) {
            let (head, tail) = body.split_at(cut);
            assert_eq!(said(&replay([head, tail], false), error), expected, "{name} cut at {cut}");
        }
    }
}

#[test]
fn a_body_is_told_by_its_beginning_and_not_by_its_headers_alone() {
    for (beginning, says_json, form) in [
        (&b"data: x"[..], true, Some(Form::Stream)),
        (b": comment", true, Some(Form::Stream)),
        (b"da", true, None),
        (b"da", false, Some(Form::Stream)),
        (b" \n{\"a\"", false, Some(Form::Whole)),
        (b"\xef\xbb", false, None),
        (b"\xef\xbb\xbf{", false, Some(Form::Whole)),
        (b"\"quota exceeded\"", true, Some(Form::Whole)),
        (b" \n", true, None),
        (b"", false, None),
        (b"<html>", false, Some(Form::Page)),
    ] {
        assert_eq!(Form::of(beginning, says_json), form, "{}", beginning.escape_ascii());
    }
}

#[test]
fn each_event_has_the_instant_of_the_read_that_completed_it() {
    let event = |text: &str| format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n");
    let body = [event("a"), event("b"), event("c")].concat();
    let (first, second) = (event("a").len() - 1, body.len() - 5);
    let mut seen = Observed::new(0, 0);
    let mut intake = Intake::new(2);
    for (at_ns, piece) in [(10, &body[..first]), (25, &body[first..second]), (70, &body[second..])] {
        intake.take(piece.as_bytes(), at_ns, &mut seen).unwrap();
    }
    assert_eq!(
        (seen.first_token_ns, seen.first_chunk_ns, seen.last_token_ns),
        (Some(25), Some(25), Some(70))
    );
    assert_eq!((seen.events, seen.reads), (3, 2), "the first read completed none, the second two");
    assert_eq!(seen.gaps.iter().collect::<Vec<_>>(), [0, 45]);
}

/// Least CPU time of a few runs, in s: what else the machine does can only add to it.
fn least(mut work: impl FnMut()) -> f64 {
    let now = || {
        let t = clock_gettime(ClockId::ThreadCPUTime);
        t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
    };
    let run = |_| {
        let start = now();
        work();
        now() - start
    };
    (0..5).map(run).fold(f64::INFINITY, f64::min)
}

/// Eight times the bytes may take 16 times as long: twice what linear work takes, a quarter of what quadratic work does.
fn is_linear(what: &str, body: impl Fn(usize) -> Vec<u8>, piece: usize) {
    let work = |body: Vec<u8>| {
        move || {
            let (taken, seen) = replay(body.chunks(piece), false);
            assert!(taken.is_ok() && seen.events > 0, "{what}");
        }
    };
    let (one, eight) = (least(work(body(1))), least(work(body(8))));

    assert!(eight < 16.0 * one, "{what}: {one} s, and eight times as much {eight} s");
}

const DONE: &str = "data: [DONE]\n\n";

fn event(content: &str) -> String {
    format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{content}\"}}}}]}}\n\n")
}

#[test]
fn the_work_is_linear_in_the_number_of_events() {
    is_linear("events", |n| (event("word").repeat(2000 * n) + DONE).into_bytes(), 1500);
}

#[test]
fn the_work_is_linear_in_the_length_of_one_event_that_comes_byte_by_byte() {
    is_linear("a huge event", |n| (event(&"x".repeat(20_000 * n)) + DONE).into_bytes(), 1);
}

#[test]
fn the_work_is_linear_in_the_number_of_lines_of_one_event() {
    let body = |n: usize| {
        format!(
            "data: {{\"choices\":[{{\"delta\":{{\"content\":\"a\"}}}}]\n{}data: }}\n\n{DONE}",
            "data:\n".repeat(20_000 * n)
        )
    };
    is_linear("lines", |n| body(n).into_bytes(), 7);
}

#[test]
fn the_work_is_linear_in_bytes_that_carry_nothing() {
    let body = |n: usize| ": keep-alive\r\n\r\r\nretry: 5\n".repeat(5_000 * n) + &event("a") + DONE;
    is_linear("comments", |n| body(n).into_bytes(), 1);
}
