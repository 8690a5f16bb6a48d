//! Text of exactly so many tokens, without search: words of known cost, joined by spaces. Owns the word lists, which
//! `find` takes from a tokenizer and `oracle` from a server's answers; the prompt makers write text with them.
//!
//! Which text a key gives is fixed by this file and the word lists alone: SplitMix64 over a hash of the key, one draw a
//! word. A change of it changes every prompt of every seed, so it belongs in the changelog.

mod class;
mod find;
mod oracle;

use std::collections::BTreeMap;

use class::{Class, Costed};

pub use oracle::OracleError;

/// Words of known cost in one tokenizer. ASCII letters only, so that text needs no escaping in JSON.
#[derive(Debug)]
pub struct Words {
    /// For the first word of a message: without a space, and as dear with one.
    start: Costed,
    /// For every other: the word with its space.
    after: Costed,
}

/// Why text cannot have an exact length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WordsError {
    /// No words, or one: nothing to make different prompts of.
    #[error(
        "prompts of an exact length cannot be made with the tokenizer {label}: only {found} of its words keep their \
         token count when joined by spaces; give --tokenizer the one that the server uses, or builtin"
    )]
    TooFew {
        /// Where the tokenizer came from.
        label: String,
        /// How many were found.
        found: usize,
    },
    /// Joined words came out longer or shorter than their sum.
    #[error(
        "prompts of an exact length cannot be made with the tokenizer {label}: a text for {planned} tokens has {counted}, \
         {} off; give --tokenizer the one that the server uses, or builtin", planned.abs_diff(*counted)
    )]
    Inexact {
        /// Where the tokenizer came from.
        label: String,
        /// What the text was made for.
        planned: usize,
        /// What it came to.
        counted: usize,
    },
    /// A length that no sum of the words' costs gives.
    #[error(
        "a text of exactly {asked} tokens cannot be made with this tokenizer, whose words take more than one token; the \
         nearest is {nearest}, {} off", asked.abs_diff(*nearest)
    )]
    Length {
        /// Tokens asked for.
        asked: u32,
        /// Nearest number of tokens that can be made.
        nearest: u32,
    },
}

/// What a text is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The part of the system prompt that all sessions have.
    SharedSystem,
    /// The part of it that is one session's own.
    UniqueSystem,
    /// A user message.
    User,
    /// A check before the load.
    Probe,
}

/// What a text depends on: equal keys give equal text, and a longer text begins with a shorter one of its key (when the
/// tokenizer's words are single tokens; otherwise up to its last word).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The run's seed.
    pub seed: u64,
    /// What it is for.
    pub purpose: Purpose,
    /// Number of the session; 0 for shared text.
    pub session: u64,
    /// Number of the turn; 0 for system prompts.
    pub turn: u32,
}

/// How a text begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// At the start of a message.
    Message,
    /// At the start of a message that no other session may begin with: its first words tell the session.
    UniqueMessage,
    /// After other text of the same message, to which its first space belongs; its first words tell the session.
    UniqueContinuation,
}

/// How many words there are to make text of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Words that follow another.
    pub after_space: usize,
    /// Words that begin a message.
    pub at_start: usize,
    /// Tokens of each, 1 but for unusual tokenizers.
    pub tokens_a_word: u32,
}

impl Words {
    /// From words by their cost, in tokens.
    fn new(
        label: &str,
        start: &BTreeMap<u32, Vec<String>>,
        after: &BTreeMap<u32, Vec<String>>,
    ) -> Result<Self, WordsError> {
        let too_few = |found| WordsError::TooFew { label: label.to_owned(), found };
        let start = Costed::new("", start).ok_or(too_few(0))?;
        let after = Costed::new(" ", after).ok_or(too_few(0))?;
        match start.main.len().min(after.main.len()) {
            found @ 0..2 => Err(too_few(found)),
            _ => Ok(Words { start, after }),
        }
    }

    /// How many words there are.
    pub fn counts(&self) -> Counts {
        Counts {
            after_space: self.after.main.len(),
            at_start: self.start.main.len(),
            tokens_a_word: self.after.cost,
        }
    }

    /// Words that follow another.
    #[expect(clippy::len_without_is_empty, reason = "there are always at least two")]
    pub fn len(&self) -> usize {
        self.after.main.len()
    }

    /// Whether such a text can have exactly this many tokens; always so when words are single tokens.
    pub fn check(&self, opening: Opening, tokens: u32) -> Result<(), WordsError> {
        self.shape(opening, tokens).map(|_| ())
    }

    /// Appends the text of a user message. The first of a session is one that no other session begins with.
    ///
    /// Returns its tokens: as many as asked for, or the nearest that can be made where [`Words::check`] says so.
    pub fn push_user(&self, out: &mut String, seed: u64, session: u64, turn: u32, tokens: u32) -> u32 {
        let opening = if turn <= 1 { Opening::UniqueMessage } else { Opening::Message };
        self.push(out, Key { seed, purpose: Purpose::User, session, turn }, opening, tokens)
    }

    /// Appends the text of a system prompt: the part that all sessions have, then the session's own. Returns its tokens,
    /// like [`Words::push_user`].
    pub fn push_system(&self, out: &mut String, seed: u64, shared: u32, session: u64, unique: u32) -> u32 {
        let common = Key { seed, purpose: Purpose::SharedSystem, session: 0, turn: 0 };
        let shared = self.push(out, common, Opening::Message, shared);
        let opening = if shared > 0 { Opening::UniqueContinuation } else { Opening::UniqueMessage };
        shared + self.push(out, Key { purpose: Purpose::UniqueSystem, session, ..common }, opening, unique)
    }

    fn push(&self, out: &mut String, key: Key, opening: Opening, tokens: u32) -> u32 {
        let made = match self.check(opening, tokens) {
            Err(WordsError::Length { nearest, .. }) => nearest,
            _ => tokens,
        };
        self.append(out, key, opening, made).expect("the nearest length is one that can be made");
        made
    }

    /// Appends a text of exactly `tokens` tokens; nothing for 0.
    ///
    /// A unique opening writes the session's number in words: digits in a mixed radix of the list lengths, the lowest
    /// first, each permuted by the seed. Sessions 0 to `at_start` − 1 (continuation: `after_space` − 1) differ from each
    /// other in the first word, all sessions within as many words as their numbers need.
    pub fn append(
        &self,
        out: &mut String,
        key: Key,
        opening: Opening,
        tokens: u32,
    ) -> Result<(), WordsError> {
        let shape = self.shape(opening, tokens)?;
        let mut draw = SplitMix(key.hash());
        let mut lead = match opening {
            Opening::Message => Lead::NONE,
            Opening::UniqueMessage | Opening::UniqueContinuation => Lead::new(key),
        };
        // Text is short against memory, and one word more than the mean a word is enough: a second growth is rare.
        out.reserve((shape.middle as usize + 2).saturating_mul(self.after.main.mean_bytes()));
        if let Some(class) = shape.first {
            out.push_str(class.piece(lead.digit(class.len()).unwrap_or_else(|| draw.below(class.len()))));
        }
        let main = &self.after.main;
        let mut middle = shape.middle;
        while middle > 0 {
            let Some(digit) = lead.digit(main.len()) else { break };
            out.push_str(main.piece(digit));
            middle -= 1;
        }
        for _ in 0..middle {
            out.push_str(main.piece(draw.below(main.len())));
        }
        if let Some(class) = shape.last {
            out.push_str(class.piece(draw.below(class.len())));
        }
        Ok(())
    }

    fn shape(&self, opening: Opening, tokens: u32) -> Result<Shape<'_>, WordsError> {
        let shape = self.shape_of(opening, tokens);
        shape.ok_or_else(|| {
            let can = |tokens: &u32| self.shape_of(opening, *tokens).is_some();
            // 0 can always be made, so the search below ends; costs are small, so the one above is short.
            let below = (0..tokens).rev().find(can).unwrap_or(0);
            let above = (tokens..=tokens.saturating_add(tokens - below)).find(can);
            let nearest = above.filter(|above| above - tokens < tokens - below).unwrap_or(below);
            WordsError::Length { asked: tokens, nearest }
        })
    }

    fn shape_of(&self, opening: Opening, tokens: u32) -> Option<Shape<'_>> {
        if tokens == 0 {
            return Some(Shape { first: None, middle: 0, last: None });
        }
        if opening == Opening::UniqueContinuation {
            let (middle, last) = self.after.fill(tokens)?;
            return Some(Shape { first: None, middle, last });
        }
        if let Some(rest) = tokens.checked_sub(self.start.cost)
            && let Some((middle, last)) = self.after.fill(rest)
        {
            return Some(Shape { first: Some(&self.start.main), middle, last });
        }
        let alone = self.start.of_cost(tokens)?;
        Some(Shape { first: Some(alone), middle: 0, last: None })
    }
}

/// Which words make up a text.
struct Shape<'a> {
    first: Option<&'a Class>,
    /// Words of the main class.
    middle: u32,
    /// A word of another class, when the main one's cost does not divide the rest.
    last: Option<&'a Class>,
}

impl Key {
    fn hash(self) -> u64 {
        let purpose = match self.purpose {
            Purpose::SharedSystem => 1,
            Purpose::UniqueSystem => 2,
            Purpose::User => 3,
            Purpose::Probe => 4,
        };
        [purpose, self.session, u64::from(self.turn)].into_iter().fold(mix(self.seed), |hash, part| {
            mix(hash.wrapping_add(GOLDEN) ^ mix(part.wrapping_add(GOLDEN)))
        })
    }
}

/// The digits of a session's number.
struct Lead {
    rest: u64,
    /// How many numbers the digits so far tell apart.
    told: u64,
    /// Permutes the next digit.
    hash: u64,
}

impl Lead {
    const NONE: Lead = Lead { rest: 0, told: Lead::SESSIONS, hash: 0 };

    /// Sessions that shall be told apart: beyond any run.
    const SESSIONS: u64 = 1 << 40;

    fn new(key: Key) -> Self {
        // The same permutation for every session of a seed; another purpose has another.
        Lead { rest: key.session, told: 1, hash: Key { session: 0, turn: 0, ..key }.hash() }
    }

    /// The next digit, while there is one: in `0..radix`.
    fn digit(&mut self, radix: usize) -> Option<usize> {
        if self.told >= Self::SESSIONS {
            return None;
        }
        let radix = radix as u64;
        let digit = self.rest % radix;
        self.rest /= radix;
        self.told = self.told.saturating_mul(radix);
        self.hash = mix(self.hash.wrapping_add(GOLDEN));
        // digit ↦ factor·digit + offset permutes the residues when the factor is prime to the radix.
        let mut factor = self.hash % radix;
        while gcd(factor, radix) != 1 {
            factor = (factor + 1) % radix;
        }
        let offset = (self.hash >> 32) % radix;
        // Less than the radix, which is a usize.
        Some((((u128::from(factor) * u128::from(digit)) + u128::from(offset)) % u128::from(radix)) as usize)
    }
}

/// SplitMix64: one multiplication chain a draw, and any state is as good as another.
struct SplitMix(u64);

impl SplitMix {
    /// In `0..bound`, for bounds below 2³²; the bias, under `bound`/2³², is of no account for words.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(GOLDEN);
        // Less than the bound, which is a usize.
        (((mix(self.0) >> 32) * bound as u64) >> 32) as usize
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests;
