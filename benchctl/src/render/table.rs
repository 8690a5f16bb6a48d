//! Aligned plain-text tables, and numbers as people read them. What is missing is a dash, never 0.

use std::io::{self, Write};

/// Stands for a value that is not there.
pub(super) const MISSING: &str = "–";
/// Rows above which the middle of a table of turns is left out.
const MOST_TURNS: usize = 24;
/// Rows kept at the beginning and at the end then.
const KEPT: (usize, usize) = (12, 4);

/// Rows of cells under a header; the first columns are left-aligned, the others right.
pub(super) struct Table {
    left_columns: usize,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// With its header.
    pub(super) fn new(left_columns: usize, header: &[&str]) -> Table {
        Table { left_columns, rows: vec![header.iter().map(|&cell| cell.to_owned()).collect()] }
    }

    /// Without a header.
    pub(super) fn headless(left_columns: usize) -> Table {
        Table { left_columns, rows: Vec::new() }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Writes it, indented by two spaces.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|c| self.rows.iter().filter_map(|row| row.get(c)).map(|cell| width(cell)).max().unwrap_or(0))
            .collect();
        for row in &self.rows {
            let mut line = String::new();
            for (c, cell) in row.iter().enumerate() {
                let padding = " ".repeat(widths[c] - width(cell));
                line += "  ";
                if c < self.left_columns {
                    line += cell;
                    line += &padding;
                } else {
                    line += &padding;
                    line += cell;
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

fn width(text: &str) -> usize {
    text.chars().count()
}

/// The rows to show of `n`; `None` stands for those left out.
pub(super) fn shown(n: usize) -> Vec<Option<usize>> {
    if n <= MOST_TURNS {
        return (0..n).map(Some).collect();
    }
    let (head, tail) = KEPT;
    (0..head).map(Some).chain([None]).chain((n - tail..n).map(Some)).collect()
}

/// A count, with its thousands apart.
pub(super) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number with so many decimals, its thousands apart.
pub(super) fn decimal(value: Option<f64>, decimals: usize) -> String {
    let Some(value) = value else { return MISSING.to_owned() };
    let text = format!("{value:.decimals$}");
    let (sign, text) = match text.strip_prefix('-') {
        // What rounds to 0 has no sign.
        Some(rest) if rest.bytes().any(|b| matches!(b, b'1'..=b'9')) => ("-", rest),
        Some(rest) => ("", rest),
        None => ("", text.as_str()),
    };
    let (whole, fraction) = text.split_once('.').map_or((text, None), |(whole, f)| (whole, Some(f)));
    let whole = whole.parse::<u64>().map_or_else(|_| whole.to_owned(), count);
    match fraction {
        Some(fraction) => format!("{sign}{whole}.{fraction}"),
        None => format!("{sign}{whole}"),
    }
}

/// Milliseconds: three decimals below 1, two below 1000, one above.
pub(super) fn ms(value: Option<f64>) -> String {
    let decimals = match value.map(f64::abs) {
        Some(size) if size < 1.0 => 3,
        Some(size) if size < 1000.0 => 2,
        _ => 1,
    };
    decimal(value, decimals)
}

/// A share as a percentage.
pub(super) fn percent(share: Option<f64>) -> String {
    match share {
        Some(share) => format!("{} %", decimal(Some(share * 100.0), 2)),
        None => MISSING.to_owned(),
    }
}

/// `1 request`, `2 requests`.
pub(super) fn counted(n: u64, noun: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{} {noun}{s}", count(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_what_matters() {
        assert_eq!(count(0), "0");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(ms(Some(0.0712)), "0.071");
        assert_eq!(ms(Some(12.345)), "12.35");
        assert_eq!(ms(Some(12345.67)), "12,345.7");
        assert_eq!(ms(Some(-0.5)), "-0.500");
        assert_eq!(ms(None), "–");
        assert_eq!(percent(Some(0.6)), "60.00 %");
        assert_eq!(decimal(Some(-0.0004), 3), "0.000");
        assert_eq!(decimal(Some(-0.004), 3), "-0.004");
        assert_eq!(decimal(Some(f64::NAN), 1), "NaN");
    }

    #[test]
    fn long_tables_lose_their_middle() {
        assert_eq!(shown(3), [Some(0), Some(1), Some(2)]);
        let rows = shown(100);
        assert_eq!(rows.len(), 17);
        assert_eq!((rows[11], rows[12], rows[13], rows[16]), (Some(11), None, Some(96), Some(99)));
    }
}
