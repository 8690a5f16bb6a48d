//! Talk on stderr. A stderr that is gone is not a reason to stop.

use std::io::Write;

use crate::render::harmless;

/// Prints a sentence for a person, after our name.
pub fn say(text: impl std::fmt::Display) {
    line(format_args!("benchctl: {text}"));
}

/// Prints a line without a name before it.
pub fn line(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{}", harmless(&text.to_string()));
}
