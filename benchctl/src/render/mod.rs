//! Answers as text for people. Each renderer is a function from a value to a writer; nothing here decides.

mod latency;
mod report;
mod spec;
mod table;

use std::borrow::Cow;
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
    report::trust(view.report, view.is_coloured, out)?;
    let mut text = Vec::new();
    report::reasons(view.report, &mut text)?;
    report::config(view.report, &mut text)?;
    writeln!(text)?;
    spec(&view.report.spec, &mut text)?;
    report::results(view.report, &mut text)?;
    writeln!(text)?;
    next(view.next, &mut text)?;
    out.write_all(harmless(&String::from_utf8_lossy(&text)).as_bytes())
}

/// Text from a server may hold anything; on a terminal it must not move the cursor, ring or change colours.
pub(crate) fn harmless(text: &str) -> Cow<'_, str> {
    let is_harmful = |c: char| c.is_control() && c != '\n';
    if !text.contains(is_harmful) {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        if is_harmful(c) { clean.extend(c.escape_default()) } else { clean.push(c) }
    }
    Cow::Owned(clean)
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
    let mut text = Vec::new();
    smoke_text(report, &mut text)?;
    out.write_all(harmless(&String::from_utf8_lossy(&text)).as_bytes())
}

/// Models that are shown of a server's list.
const MODELS_SHOWN: usize = 10;

fn smoke_text(report: &SmokeReport, out: &mut impl Write) -> io::Result<()> {
    // A name is one line, whatever is in it.
    let one_line = |name: &str| name.replace('\n', "\\n");
    writeln!(out, "{} answers as {}", report.url, one_line(&report.model))?;
    writeln!(out, "  TTFT      {} ms", ms(report.ttft_ms))?;
    writeln!(out, "  latency   {} ms", ms(report.latency_ms))?;
    let tokens = |n: Option<u32>| decimal(n.map(f64::from), 0);
    writeln!(out, "  tokens    {} in, {} out", tokens(report.input_tokens), tokens(report.output_tokens))?;
    writeln!(out, "  reply     {:?}", report.reply)?;
    let models = match &report.models {
        Some(models) => {
            let names: Vec<String> = models.iter().take(MODELS_SHOWN).map(|name| one_line(name)).collect();
            let rest = models.len().saturating_sub(MODELS_SHOWN);
            let more = if rest > 0 { format!(", and {rest} more") } else { String::new() };
            format!("{}{more}", names.join(", "))
        }
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
    fn text_from_outside_cannot_drive_the_terminal() {
        assert_eq!(harmless("a\u{1b}[31mred\u{7}\r\u{9b}1m\nb"), "a\\u{1b}[31mred\\u{7}\\r\\u{9b}1m\nb");
        let mut report = sample::report();
        report.config.model = "m\u{1b}[2J".into();
        assert!(!run_text(&report, Next::NotSaved).contains('\u{1b}'));
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
