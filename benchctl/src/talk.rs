//! Talk on stderr. A stderr that is gone is not a reason to stop.

use std::io::Write;

/// Prints a sentence for a person, after our name.
pub fn say(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "benchctl: {text}");
}

/// Prints a line as it is.
pub fn line(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
