//! A tokenizer's vocabulary → the words that keep their token count when joined by spaces, checked on long joins.

use std::collections::{BTreeMap, HashMap, HashSet};

use tokenizers::Encoding;

use super::class::ENOUGH;
use super::{Key, Opening, Purpose, SplitMix, Words, WordsError};
use crate::engine::tokenizer::Tokenizer;

/// Candidates that are tried, those with the lowest ids, which are the commonest: more would add to the load time only.
const MOST: usize = 50_000;

/// Words in a text that classifies candidates: long enough to be real joins.
const CHUNK: usize = 256;

/// Longest join that is checked, in tokens.
const LONGEST_JOIN: usize = 1500;

/// Fewest joins that are checked.
const JOINS: usize = 40;

/// How often offenders are dropped and the rest checked again; the first round finds nothing with usual tokenizers.
const ROUNDS: u64 = 8;

type ByCost = BTreeMap<u32, Vec<String>>;

impl Words {
    /// The words of this tokenizer: a list for the start of a message and one for after a space.
    ///
    /// Words are single tokens. Where too few of them are, as with a character-level vocabulary, words of several tokens
    /// serve, counted one by one; then not every length can be made (see [`Words::check`]).
    pub fn find(tokenizer: &Tokenizer) -> Result<Self, WordsError> {
        let mut lists = Lists::of_single_tokens(tokenizer);
        if lists.is_poor() {
            lists.add_spelled(tokenizer);
        }
        let mut round = 0;
        loop {
            let words = Words::new(tokenizer.label(), &lists.start, &lists.after)?;
            let failed = words.failed_joins(tokenizer, round);
            let Some((planned, text)) = failed.first() else { return Ok(words) };
            round += 1;
            if round == ROUNDS || !lists.drop_offenders(tokenizer, &failed) {
                return Err(WordsError::Inexact {
                    label: tokenizer.label().to_owned(),
                    planned: *planned,
                    counted: tokenizer.count(text),
                });
            }
        }
    }

    /// Makes long random texts that together use each word twice or so; returns those of another length than planned.
    fn failed_joins(&self, tokenizer: &Tokenizer, round: u64) -> Vec<(usize, String)> {
        let counts = self.counts();
        let joins = JOINS.max(2 * counts.after_space * counts.tokens_a_word as usize / LONGEST_JOIN);
        let mut lengths = SplitMix(round);
        let texts: Vec<(usize, String)> = (0..joins as u64)
            .filter_map(|number| {
                let tokens = if number % 4 == 0 { 1 + lengths.below(LONGEST_JOIN) } else { LONGEST_JOIN };
                let key = Key { seed: round, purpose: Purpose::Probe, session: number, turn: 0 };
                let mut text = String::new();
                // A length that the words cannot make is no offence of theirs; callers are told when they ask for it.
                self.append(&mut text, key, Opening::Message, u32::try_from(tokens).ok()?).ok()?;
                Some((tokens, text))
            })
            .collect();
        let counted = counts_of(tokenizer, texts.iter().map(|(_, text)| text.as_str()).collect());
        texts
            .into_iter()
            .zip(counted)
            .filter(|((planned, _), counted)| planned != counted)
            .map(|(t, _)| t)
            .collect()
    }
}

/// Candidates by cost, for the two places.
#[derive(Default)]
struct Lists {
    start: ByCost,
    after: ByCost,
}

impl Lists {
    fn of_single_tokens(tokenizer: &Tokenizer) -> Self {
        let candidates = candidates(tokenizer);
        let after = singles(tokenizer, &candidates, ' ');
        // At the start of a text, and after a line break as templates have it: some tokenizers differ there.
        let mut start = singles(tokenizer, &after, '\n');
        let alone = counts_of(tokenizer, start.iter().map(String::as_str).collect());
        let mut alone = alone.into_iter();
        start.retain(|_| alone.next() == Some(1));
        Lists { start: BTreeMap::from([(1, start)]), after: BTreeMap::from([(1, after)]) }
    }

    fn is_poor(&self) -> bool {
        [&self.start, &self.after].iter().any(|lists| lists.get(&1).is_none_or(|words| words.len() < ENOUGH))
    }

    /// Adds short strings of letters and the built-in tokenizer's words at whatever they cost.
    fn add_spelled(&mut self, tokenizer: &Tokenizer) {
        let letters = || (b'a'..=b'z').map(char::from);
        let mut words: Vec<String> = letters().map(String::from).collect();
        words.extend(letters().flat_map(|a| letters().map(move |b| format!("{a}{b}"))));
        words.extend(letters().flat_map(|a| letters().map(move |b| format!("{a}o{b}"))));
        let known = candidates(&Tokenizer::builtin());
        words.extend(known.into_iter().filter(|word| word.len() > 3 && is_lower(word)));

        let encode = |texts: Vec<String>| encodings_of(tokenizer, texts.iter().map(String::as_str).collect());
        // A letter, or one and a line break, before it: what follows is not at the start of the text.
        let (space, line) = (tokenizer.count("a"), tokenizer.count("a\n"));
        let after = encode(words.iter().map(|word| format!("a {word}")).collect());
        let on_line = encode(words.iter().map(|word| format!("a\n{word}")).collect());
        let alone = encode(words.clone());
        // Words that look the same to the tokenizer, as all do for which it has only "unknown", cannot tell sessions apart.
        let mut looks = HashSet::new();
        for (i, word) in words.into_iter().enumerate() {
            if !looks.insert(after[i].get_ids()) {
                continue;
            }
            if alone[i].len() == on_line[i].len().saturating_sub(line) {
                add(&mut self.start, alone[i].len(), &word);
            }
            add(&mut self.after, after[i].len().saturating_sub(space), &word);
        }
    }

    /// Drops the words that cost something else in these texts than alone; whether there were any.
    fn drop_offenders(&mut self, tokenizer: &Tokenizer, failed: &[(usize, String)]) -> bool {
        let cost_of = |lists: &ByCost| -> HashMap<String, usize> {
            lists.iter().flat_map(|(cost, words)| words.iter().map(|w| (w.clone(), *cost as usize))).collect()
        };
        let (start, after) = (cost_of(&self.start), cost_of(&self.after));
        let mut offenders = HashSet::new();
        for (_, text) in failed {
            let Ok(encoding) = tokenizer.inner().encode(text.as_str(), false) else { continue };
            let mut tokens = Tokens::new(&encoding);
            let mut at = 0;
            for (i, word) in text.split(' ').enumerate() {
                let end = at + word.len();
                let costs = if i == 0 { &start } else { &after };
                if costs.get(word) != Some(&tokens.up_to(end).len()) {
                    offenders.insert(word.to_owned());
                }
                at = end + 1;
            }
        }
        for words in self.start.values_mut().chain(self.after.values_mut()) {
            words.retain(|word| !offenders.contains(word));
        }
        !offenders.is_empty()
    }
}

fn add(lists: &mut ByCost, cost: usize, word: &str) {
    let words = lists.entry(u32::try_from(cost).unwrap_or(u32::MAX)).or_default();
    if !words.iter().any(|known| known == word) {
        words.push(word.to_owned());
    }
}

/// Words of ASCII letters in the vocabulary, in the order of their ids; where the vocabulary marks the tokens that begin
/// (or end) a word, only these.
fn candidates(tokenizer: &Tokenizer) -> Vec<String> {
    let inner = tokenizer.inner();
    let (mut marked, mut bare) = (Vec::new(), Vec::new());
    let ids = u32::try_from(inner.get_vocab_size(true)).unwrap_or(u32::MAX);
    for token in (0..ids).filter_map(|id| inner.id_to_token(id)) {
        let word = token.strip_prefix(['Ġ', '▁']).or_else(|| token.strip_suffix("</w>"));
        let list = if word.is_some() { &mut marked } else { &mut bare };
        let word = word.unwrap_or(&token);
        if !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphabetic()) {
            list.push(word.to_owned());
        }
    }
    let mut words = if marked.len() < ENOUGH { bare } else { marked };
    words.truncate(MOST);
    words
}

fn is_lower(word: &str) -> bool {
    word.bytes().all(|b| b.is_ascii_lowercase())
}

/// Those of the words that are one token, the separator aside (a space is part of it), between others of them. Of words
/// with the same token, as where case is folded, the first.
fn singles(tokenizer: &Tokenizer, words: &[String], separator: char) -> Vec<String> {
    let texts = words.chunks(CHUNK).map(|chunk| {
        // A line break first, so that the first word is not at the start, where some tokenizers add a space.
        let mut text = String::from(if separator == ' ' { "\n" } else { "" });
        for word in chunk {
            text.push(separator);
            text.push_str(word);
        }
        text
    });
    let Ok(encodings) = tokenizer.inner().encode_batch(texts.collect(), false) else { return Vec::new() };

    let mut seen = HashSet::new();
    let mut found = Vec::new();
    for (chunk, encoding) in words.chunks(CHUNK).zip(&encodings) {
        let mut tokens = Tokens::new(encoding);
        let mut at = usize::from(separator == ' ');
        for word in chunk {
            let (from, end) = (if separator == ' ' { at } else { at + 1 }, at + 1 + word.len());
            tokens.up_to(from);
            if let [token] = tokens.up_to(end)
                && encoding.get_offsets()[*token].0 >= from
                && seen.insert(encoding.get_ids()[*token])
            {
                found.push(word.clone());
            }
            at = end;
        }
    }
    found
}

/// The tokens of a text, taken from left to right by where they end.
struct Tokens<'a> {
    offsets: &'a [(usize, usize)],
    indices: Vec<usize>,
    next: usize,
}

impl<'a> Tokens<'a> {
    fn new(encoding: &'a Encoding) -> Self {
        let offsets = encoding.get_offsets();
        Tokens { offsets, indices: (0..offsets.len()).collect(), next: 0 }
    }

    /// Indices of the tokens that end at this byte or before and were not taken yet.
    fn up_to(&mut self, end: usize) -> &[usize] {
        let from = self.next;
        while self.offsets.get(self.next).is_some_and(|token| token.1 <= end) {
            self.next += 1;
        }
        &self.indices[from..self.next]
    }
}

/// Encodes many texts on all cores.
fn encodings_of(tokenizer: &Tokenizer, texts: Vec<&str>) -> Vec<Encoding> {
    let encodings = tokenizer.inner().encode_batch_fast(texts, false);
    encodings.expect("unknown characters were probed when the tokenizer was loaded")
}

fn counts_of(tokenizer: &Tokenizer, texts: Vec<&str>) -> Vec<usize> {
    encodings_of(tokenizer, texts).iter().map(Encoding::len).collect()
}
