//! Answers as text for people. Each renderer is a function from a value to a writer; nothing here decides.

mod latency;
mod report;
mod spec;
mod table;

use std::io::{self, Write};

use proto::report::{Report, SmokeReport};

use table::{MISSING, decimal, ms};

pub use spec::spec;

/// A run's report and what stands around it.
#[derive(Debug)]
pub struct RunView<'a> {
    /// The report.
    pub report: &'a Report,
    /// What to do next.
    pub next: &'a Next,
    /// Colour the verdict.
    pub is_coloured: bool,
}

/// The last line.
#[derive(Debug)]
pub enum Next {
    /// The result was saved there.
    Saved(String),
    /// It could not be saved; the reason is told apart.
    NotSaved,
    /// Nothing was saved; this command would.
    Save(String),
}

/// The whole report: verdict, workload, results, what to do next.
pub fn run(view: &RunView<'_>, out: &mut impl Write) -> io::Result<()> {
    report::verdict(view.report, view.is_coloured, out)?;
    report::config(view.report, out)?;
    writeln!(out)?;
    spec(&view.report.spec, out)?;
    report::results(view.report, out)?;
    writeln!(out)?;
    next(view.next, out)
}

/// What to do next.
pub fn next(next: &Next, out: &mut impl Write) -> io::Result<()> {
    match next {
        Next::Saved(path) => writeln!(out, "Saved with every request's record to {path}"),
        Next::NotSaved => writeln!(out, "Not saved; this text is all that is left of the run."),
        Next::Save(command) => writeln!(out, "Nothing was saved. To keep the next one: {command}"),
    }
}

/// What a smoke request found.
pub fn smoke(report: &SmokeReport, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{} answers as {}", report.url, report.model)?;
    writeln!(out, "  TTFT      {} ms", ms(report.ttft_ms))?;
    writeln!(out, "  latency   {} ms", ms(report.latency_ms))?;
    let tokens = |n: Option<u32>| decimal(n.map(f64::from), 0);
    writeln!(out, "  tokens    {} in, {} out", tokens(report.input_tokens), tokens(report.output_tokens))?;
    writeln!(out, "  reply     {:?}", report.reply)?;
    let models = match &report.models {
        Some(models) => models.join(", "),
        None => MISSING.to_owned(),
    };
    writeln!(out, "  models    {models}")?;
    let capabilities = [
        ("usage", report.has_usage),
        ("cached tokens", report.has_cached_tokens),
        ("/metrics", report.has_metrics),
        ("/tokenize", report.has_tokenize),
    ];
    let list = |wanted: bool| {
        let names: Vec<&str> =
            capabilities.iter().filter(|(_, has)| *has == wanted).map(|(name, _)| *name).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    writeln!(out, "  has       {}", list(true))?;
    writeln!(out, "  lacks     {}", list(false))?;
    for dropped in &report.dropped_parameters {
        writeln!(out, "  parameter {dropped}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    fn text(render: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        render(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn run_text(report: &Report, next: Next) -> String {
        text(|out| run(&RunView { report, next: &next, is_coloured: false }, out))
    }

    #[test]
    fn a_closed_loop_that_went_well() {
        let next = Next::Save("benchctl run --sim --save-result results.json".into());
        insta::assert_snapshot!(run_text(&sample::report(), next));
    }

    #[test]
    fn an_open_loop_in_which_much_went_wrong() {
        insta::assert_snapshot!(run_text(&sample::troubled_report(), Next::Saved("r.json".into())));
    }

    #[test]
    fn a_run_in_which_nothing_was_measured_shows_no_zeros_for_what_is_missing() {
        insta::assert_snapshot!(run_text(&sample::empty_report(), Next::NotSaved));
    }

    #[test]
    fn only_the_verdicts_word_is_coloured() {
        let report = sample::report();
        let next = Next::NotSaved;
        let coloured = text(|out| run(&RunView { report: &report, next: &next, is_coloured: true }, out));
        assert!(coloured.starts_with("verdict: \u{1b}[32mvalid\u{1b}[0m"));
        assert_eq!(coloured.matches('\u{1b}').count(), 2);
    }

    #[test]
    fn a_spec_by_itself() {
        insta::assert_snapshot!(text(|out| spec(&sample::report().spec, out)));
    }

    #[test]
    fn a_smoke_request() {
        insta::assert_snapshot!(text(|out| smoke(&sample::smoke(), out)));
    }
}
