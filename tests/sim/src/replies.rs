//! What is answered: how many tokens, which ids, and the text that each of them adds.
//!
//! All of it is drawn from the seed and the digest of the messages, so that the same messages get the same
//! reply, in whatever order and at whatever time they come.

use std::collections::HashSet;

use anyhow::{Result, bail};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

use crate::options::{ReplyOptions, Text};
use crate::tokens::Tokens;

/// Words that replies are drawn from, at most.
const WORDS_MAX: usize = 1024;
/// With fewer, replies would be too much alike.
const WORDS_MIN: usize = 16;
/// Joins on which the words are tried, and words in each.
const TRIALS: usize = 64;
const TRIAL_WORDS: usize = 128;

/// A generator of its own for each purpose, from the seed and a request's digest.
pub(crate) fn rng(seed: u64, purpose: &str, digest: &[u8; 32]) -> ChaCha8Rng {
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update(digest);
    hash.update(purpose);
    ChaCha8Rng::from_seed(hash.finalize().into())
}

/// One generated reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) ids: Vec<u32>,
    pub(crate) text: String,
    /// Where in `text` each token's own text ends, in bytes.
    pub(crate) ends: Vec<usize>,
    /// Shorter than was asked for.
    pub(crate) early: bool,
}

/// What a request says about its reply's length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Length {
    pub(crate) max_tokens: u32,
    pub(crate) min_tokens: u32,
    pub(crate) ignore_eos: bool,
}

/// Makes replies.
pub(crate) struct Author {
    seed: u64,
    options: ReplyOptions,
    words: Vec<Word>,
    ordinary: Vec<u32>,
}

/// A word that is one token, first in a text and after a space.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Word {
    text: String,
    first_id: u32,
    spaced_id: u32,
}

impl Author {
    /// Finds the words, and tries them on long random joins.
    pub(crate) fn new(seed: u64, options: ReplyOptions, tokens: &Tokens) -> Result<Self> {
        let (words, ordinary) = match options.text {
            Text::Random => (Vec::new(), tokens.vocabulary().into_iter().map(|(id, _)| id).collect()),
            Text::Words | Text::Fixed => (stable_words(seed, tokens)?, Vec::new()),
        };
        Ok(Self { seed, options, words, ordinary })
    }

    /// The reply to the messages with this digest.
    pub(crate) fn reply(&self, digest: &[u8; 32], length: Length, tokens: &Tokens) -> Reply {
        let count = self.count(digest, length);
        let early = count < length.max_tokens;
        let n = count as usize;
        if self.options.text == Text::Random {
            let mut rng = rng(self.seed, "random", digest);
            let ids: Vec<u32> =
                (0..n).map(|_| self.ordinary[rng.random_range(0..self.ordinary.len())]).collect();
            return Reply::new(ids.clone(), tokens.pieces(&ids).into_iter(), early);
        }
        let whose = if self.options.text == Text::Fixed { &[0; 32] } else { digest };
        let mut rng = rng(self.seed, "words", whose);
        let words: Vec<&Word> = (0..n).map(|_| &self.words[rng.random_range(0..self.words.len())]).collect();
        let id = |(at, word): (usize, &&Word)| if at == 0 { word.first_id } else { word.spaced_id };
        let ids = words.iter().enumerate().map(id).collect();
        let piece =
            |(at, word): (usize, &&Word)| if at == 0 { word.text.clone() } else { format!(" {}", word.text) };
        Reply::new(ids, words.iter().enumerate().map(piece), early)
    }

    /// All that was asked for, unless --early-stop strikes: then 1..max_tokens. min_tokens holds a
    /// stopping model back, but not one that stops in spite of ignore_eos.
    fn count(&self, digest: &[u8; 32], length: Length) -> u32 {
        let mut rng = rng(self.seed, "length", digest);
        let strikes = rng.random::<f64>() < self.options.early_stop;
        let least = if length.ignore_eos { 1 } else { length.min_tokens.max(1) };
        if strikes && least < length.max_tokens {
            rng.random_range(least..length.max_tokens)
        } else {
            length.max_tokens
        }
    }
}

impl Reply {
    fn new(ids: Vec<u32>, pieces: impl Iterator<Item = String>, early: bool) -> Self {
        let mut text = String::new();
        let ends = pieces
            .map(|piece| {
                text.push_str(&piece);
                text.len()
            })
            .collect();
        Self { ids, text, ends, early }
    }
}

/// Words of lower-case letters that are one token with and without a space before them, and stay so in
/// long random joins.
fn stable_words(seed: u64, tokens: &Tokens) -> Result<Vec<Word>> {
    let mut words = Vec::new();
    let mut seen = HashSet::new();
    for (_, token) in tokens.vocabulary() {
        // Byte-level tokenizers write the space as Ġ, SentencePiece as ▁.
        let Some(text) = token.strip_prefix(['\u{120}', '\u{2581}', ' ']) else { continue };
        if !(2..=12).contains(&text.len())
            || !text.bytes().all(|b| b.is_ascii_lowercase())
            || !seen.insert(text.to_owned())
        {
            continue;
        }
        let alone = tokens.encode_fresh(text, false)?;
        let twice = tokens.encode_fresh(&format!("{text} {text}"), false)?;
        if let ([alone], [first_id, spaced_id]) = (alone.as_slice(), twice.as_slice())
            && alone == first_id
        {
            words.push(Word { text: text.to_owned(), first_id: *first_id, spaced_id: *spaced_id });
        }
        if words.len() == WORDS_MAX {
            break;
        }
    }
    let mut rng = rng(seed, "trials", &[0; 32]);
    let mut trial = 0;
    while trial < TRIALS && words.len() >= WORDS_MIN {
        words.shuffle(&mut rng);
        let join: Vec<&Word> = words.iter().cycle().take(TRIAL_WORDS).collect();
        let text = join.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" ");
        let ids = tokens.encode_fresh(&text, false)?;
        let meant = |at: usize| if at == 0 { join[at].first_id } else { join[at].spaced_id };
        match (0..join.len()).find(|at| ids.get(*at) != Some(&meant(*at))) {
            None => trial += 1,
            // The word there, or the one before it, does not stay one token: both go.
            Some(at) => {
                let unstable: HashSet<Word> =
                    join[at.saturating_sub(1)..=at].iter().map(|w| (*w).clone()).collect();
                words.retain(|word| !unstable.contains(word));
            }
        }
    }
    if words.len() < WORDS_MIN {
        bail!(
            "this tokenizer has only {} words that stay one token each, and replies need {WORDS_MIN}; use --reply random",
            words.len()
        );
    }
    words.sort_by(|a, b| a.text.cmp(&b.text));
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: Length = Length { max_tokens: 40, min_tokens: 0, ignore_eos: true };

    fn author(text: Text, early_stop: f64) -> (Author, Tokens) {
        let tokens = Tokens::load("builtin").unwrap();
        let options = ReplyOptions { text, early_stop, default_max_tokens: 128 };
        (Author::new(7, options, &tokens).unwrap(), tokens)
    }

    #[test]
    fn words_tokenise_back_to_the_generated_ids() {
        let (author, tokens) = author(Text::Words, 0.0);
        for n in 0..100u8 {
            let reply = author.reply(&[n; 32], LENGTH, &tokens);
            assert_eq!(tokens.encode_fresh(&reply.text, false).unwrap(), reply.ids);
            assert_eq!((reply.ids.len(), reply.ends.len(), reply.early), (40, 40, false));
            assert_eq!(reply.ends.last(), Some(&reply.text.len()));
        }
    }

    #[test]
    fn the_same_messages_get_the_same_reply_and_others_another() {
        for text in [Text::Words, Text::Random] {
            let (author, tokens) = author(text, 0.0);
            let reply = author.reply(&[1; 32], LENGTH, &tokens);
            assert_eq!(author.reply(&[1; 32], LENGTH, &tokens), reply);
            assert_ne!(author.reply(&[2; 32], LENGTH, &tokens).ids, reply.ids);
        }
    }

    #[test]
    fn a_fixed_reply_depends_on_its_length_only() {
        let (author, tokens) = author(Text::Fixed, 0.0);
        let long = author.reply(&[1; 32], LENGTH, &tokens);
        let short = author.reply(&[2; 32], Length { max_tokens: 10, ..LENGTH }, &tokens);
        assert!(long.text.starts_with(&short.text));
    }

    #[test]
    fn random_ids_keep_their_number_whatever_their_text_becomes() {
        let (author, tokens) = author(Text::Random, 0.0);
        let reply = author.reply(&[1; 32], Length { max_tokens: 400, ..LENGTH }, &tokens);
        assert_eq!((reply.ids.len(), reply.ends.len()), (400, 400));
        assert_ne!(tokens.encode_fresh(&reply.text, false).unwrap().len(), 400);
    }

    #[test]
    fn early_stops_strike_their_share_and_stay_below_max() {
        let (author, tokens) = author(Text::Fixed, 0.3);
        let digest = |n: u16| {
            let mut digest = [0; 32];
            digest[..2].copy_from_slice(&n.to_le_bytes());
            digest
        };
        let early: Vec<_> = (0..2000)
            .map(|n| author.reply(&digest(n), LENGTH, &tokens))
            .filter(|reply| reply.early)
            .collect();
        assert!((500..700).contains(&early.len()), "{}", early.len());
        assert!(early.iter().all(|reply| (1..40).contains(&reply.ids.len())));
    }

    #[test]
    fn min_tokens_holds_unless_ignore_eos_is_defeated() {
        let (author, tokens) = author(Text::Fixed, 1.0);
        let count = |n: u8, length| author.reply(&[n; 32], length, &tokens).ids.len();
        let held = Length { min_tokens: 30, ignore_eos: false, ..LENGTH };
        assert!((0..100).all(|n| count(n, held) >= 30));
        assert!((0..100).any(|n| count(n, Length { ignore_eos: true, ..held }) < 30));
        assert_eq!(count(1, Length { max_tokens: 1, ..LENGTH }), 1);
    }
}
