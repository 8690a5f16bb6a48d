//! The Prometheus text format, as far as counters and gauges need it: lines of a name, labels and a value. Own code
//! because the crates for it take no colon in a name, which every name of vLLM, SGLang and llama.cpp has.

use std::borrow::Cow;

/// Names and values.
type Labels<'a> = Vec<(&'a str, Cow<'a, str>)>;

/// One line's value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Point<'a> {
    /// Name of the series, a histogram's `_sum`, `_count` or `_bucket` included.
    pub(super) name: &'a str,
    /// Labels in the order of the line.
    pub(super) labels: Labels<'a>,
    /// Value; can be infinite or not a number.
    pub(super) value: f64,
}

impl Point<'_> {
    /// A label's value.
    pub(super) fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| *label == name).map(|(_, value)| value.as_ref())
    }
}

/// The points of a text, in its order. Comments, time stamps and exemplars are left out, and so is a line that is
/// none of the format.
pub(super) fn points(text: &str) -> impl Iterator<Item = Point<'_>> {
    text.lines().filter_map(point)
}

fn point(line: &str) -> Option<Point<'_>> {
    let line = line.trim();
    let end = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, rest) = line.split_at(end);
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b':') {
        return None;
    }
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    // Rust reads Go's words for infinities and NaN too.
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Point { name, labels, value })
}

/// Labels after the opening brace, and what follows the closing one.
fn labels(mut rest: &str) -> Option<(Labels<'_>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches(|c: char| c == ',' || c.is_whitespace());
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, quoted) = rest.split_once('=')?;
        let quoted = quoted.trim_start().strip_prefix('"')?;
        let (value, after) = unquoted(quoted)?;
        labels.push((name.trim(), value));
        rest = after;
    }
}

/// A label's value after its opening quote, and what follows the closing one.
fn unquoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let stop = text.find(['"', '\\'])?;
    if text.as_bytes()[stop] == b'"' {
        return Some((Cow::Borrowed(&text[..stop]), &text[stop + 1..]));
    }
    let mut value = text[..stop].to_owned();
    let mut characters = text[stop..].char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((Cow::Owned(value), &text[stop + at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn one(line: &str) -> Point<'_> {
        let mut all = points(line);
        let first = all.next().unwrap_or_else(|| panic!("{line}"));
        assert_eq!(all.next(), None);
        first
    }

    #[test]
    fn names_have_colons_and_values_any_form() {
        for (line, name, value) in [
            ("vllm:num_requests_running 3", "vllm:num_requests_running", 3.0),
            ("a{} 1.5", "a", 1.5),
            ("a{b=\"c\"}2", "a", 2.0),
            ("a 8.128902e+06 1395066363000", "a", 8_128_902.0),
            ("  a\t+Inf", "a", f64::INFINITY),
            ("a -Inf", "a", f64::NEG_INFINITY),
            ("a_bucket{le=\"0.1\"} 8 # {trace=\"x\"} 0.05", "a_bucket", 8.0),
        ] {
            let point = one(line);
            assert_eq!((point.name, point.value), (name, value), "{line}");
        }
        assert!(one("a NaN").value.is_nan());
    }

    #[test]
    fn a_label_may_hold_whatever_ends_labels_elsewhere() {
        let point = one(r#"a{model="x{y},z=\"q\"\\ \n", engine = "0",} 7"#);
        assert_eq!(point.label("model"), Some("x{y},z=\"q\"\\ \n"));
        assert_eq!(point.label("engine"), Some("0"));
        assert_eq!((point.label("none"), point.value), (None, 7.0));
    }

    #[test]
    fn what_is_no_point_is_left_out() {
        for text in [
            "",
            "# HELP a b 1",
            "# TYPE a counter",
            "a",
            "a b",
            "a{b=\"c\" 1",
            "a{b=\"c} 1",
            "a{b=c} 1",
            "a{\"b\\",
            "{\"error\": {\"code\": 501}}",
            "<html><body> 404 </body></html>",
        ] {
            assert_eq!(points(text).collect::<Vec<_>>(), [], "{text}");
        }
        assert_eq!(points("a 1\r\nnonsense\n\n# x\nb 2").count(), 2);
    }

    proptest! {
        #[test]
        fn any_label_is_read_as_it_was_written(value in any::<String>()) {
            let escaped = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            // A bare carriage return does not end a line, but one before a newline belongs to its end.
            let line = format!("a{{b=\"{escaped}\",c=\"d\"}} 4");
            let point = one(&line);
            prop_assert_eq!(point.label("b"), Some(value.as_str()));
            prop_assert_eq!((point.label("c"), point.value), (Some("d"), 4.0));
        }

        #[test]
        fn no_text_is_too_strange(text in any::<String>()) {
            let _ = points(&text).count();
        }
    }
}
