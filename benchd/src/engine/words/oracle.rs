//! A server's token counts → words that are one token each, where its tokenizer cannot be had. Asks for whole groups
//! of common words and splits those whose count is off: some tens of texts, in under twenty calls.

use super::class::ENOUGH;
use super::{Key, Opening, Purpose, Words, WordsError};
use crate::engine::tokenizer::Tokenizer;

/// The commonest words are tried: nearly all of them are single tokens everywhere.
const CANDIDATES: usize = 1024;

/// Words in a group at first.
const GROUP: usize = 64;

/// A group of this size that is still off is given up, as long as enough words are left.
const SMALL: usize = 8;

/// Lengths of the texts that are counted in the end, in tokens.
const CHECKED: [u32; 6] = [1, 2, 7, 64, 500, 1500];

/// Why a server's counts gave no words.
#[derive(Debug, thiserror::Error)]
pub enum OracleError<E> {
    /// It could not be asked.
    #[error("{0}")]
    Asked(E),
    /// It answered another number of counts than there were texts.
    #[error("the server's /tokenize answered {counts} counts for {texts} texts; use another --tokenizer")]
    Answer {
        /// Texts sent.
        texts: usize,
        /// Counts that came.
        counts: usize,
    },
    /// Its counts leave nothing to make exact text of.
    #[error(transparent)]
    Words(#[from] WordsError),
}

impl Words {
    /// Words of the tokenizer behind `count`, which gives the token count of each text; what the server adds to every text
    /// may be in it.
    pub fn from_oracle<E>(
        count: impl FnMut(&[String]) -> Result<Vec<usize>, E>,
    ) -> Result<Self, OracleError<E>> {
        let mut oracle = Oracle(count);
        let anchors = oracle.ask(&["1".to_owned(), "1\n1".to_owned(), "1\n1\n1".to_owned()])?;
        let base = anchors[0];
        // A line break can be a token or none.
        let line = anchors[2].saturating_sub(anchors[1]).saturating_sub(1);

        let after = oracle.sift(common_words(), ' ', |words| base + words)?;
        let start = oracle.sift(after.clone(), '\n', |words| base + words * (1 + line))?;
        let words = Words::new("server", &[(1, start)].into(), &[(1, after)].into())?;
        oracle.check(&words)?;
        Ok(words)
    }
}

struct Oracle<F>(F);

impl<E, F: FnMut(&[String]) -> Result<Vec<usize>, E>> Oracle<F> {
    fn ask(&mut self, texts: &[String]) -> Result<Vec<usize>, OracleError<E>> {
        let counts = (self.0)(texts).map_err(OracleError::Asked)?;
        if counts.len() == texts.len() {
            Ok(counts)
        } else {
            Err(OracleError::Answer { texts: texts.len(), counts: counts.len() })
        }
    }

    /// The words whose groups count what they should, after a digit, each with the separator before it.
    fn sift(
        &mut self,
        words: Vec<String>,
        separator: char,
        expected: impl Fn(usize) -> usize,
    ) -> Result<Vec<String>, OracleError<E>> {
        let mut good = Vec::new();
        let mut given_up: Vec<Vec<String>> = Vec::new();
        let mut open: Vec<Vec<String>> = words.chunks(GROUP).map(<[String]>::to_vec).collect();
        let mut smallest = SMALL;
        while !open.is_empty() {
            let text = |group: &Vec<String>| {
                group.iter().fold(String::from("1"), |text, word| format!("{text}{separator}{word}"))
            };
            let counts = self.ask(&open.iter().map(text).collect::<Vec<_>>())?;
            for (group, count) in std::mem::take(&mut open).into_iter().zip(counts) {
                if count == expected(group.len()) {
                    good.extend(group);
                } else if group.len() > smallest {
                    open.extend(group.chunks(group.len().div_ceil(2)).map(<[String]>::to_vec));
                } else {
                    given_up.push(group);
                }
            }
            if open.is_empty() && good.len() < ENOUGH && smallest > 1 {
                smallest = 1;
                let groups = std::mem::take(&mut given_up);
                open.extend(
                    groups.iter().flat_map(|g| g.chunks(g.len().div_ceil(2).max(1)).map(<[String]>::to_vec)),
                );
            }
        }
        Ok(good)
    }

    /// Counts whole texts: lengths must differ from the shortest's by what was planned.
    fn check(&mut self, words: &Words) -> Result<(), OracleError<E>> {
        let mut texts = Vec::new();
        for (session, tokens) in (0..).zip(CHECKED.into_iter().chain(CHECKED)) {
            let key = Key { seed: 0, purpose: Purpose::Probe, session, turn: 0 };
            let mut text = String::new();
            words.append(&mut text, key, Opening::Message, tokens)?;
            texts.push(text);
        }
        let counts = self.ask(&texts)?;
        // The first is one token; the rest of its count is what the server adds.
        let added = counts[0].saturating_sub(1);
        for (planned, counted) in CHECKED.into_iter().chain(CHECKED).zip(counts) {
            let (planned, counted) = (planned as usize, counted.saturating_sub(added));
            if planned != counted {
                return Err(WordsError::Inexact { label: "server".to_owned(), planned, counted }.into());
            }
        }
        Ok(())
    }
}

/// Lower-case words, since a tokenizer that folds case would take "See" and "see" for the same; the commonest first.
fn common_words() -> Vec<String> {
    let builtin = Words::find(&Tokenizer::builtin()).expect("the built-in tokenizer has words; tested");
    let class = &builtin.start.main;
    (0..class.len())
        .map(|index| class.piece(index))
        .filter(|word| word.len() > 1 && word.bytes().all(|b| b.is_ascii_lowercase()))
        .take(CANDIDATES)
        .map(str::to_owned)
        .collect()
}
