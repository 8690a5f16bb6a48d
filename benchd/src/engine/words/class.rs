//! Word lists by what their words cost in tokens, laid out for copying: one string per list, spaces included.

use std::collections::BTreeMap;

/// Below this many words of one cost, a dearer class with more words makes better text: sessions differ earlier.
pub(super) const ENOUGH: usize = 256;

/// Words of one cost, end to end in one string, each with what stands before it.
#[derive(Debug, Default)]
pub(super) struct Class {
    text: String,
    /// End of each piece, after a leading 0.
    bounds: Vec<usize>,
}

impl Class {
    fn new(before: &str, words: &[String]) -> Self {
        let mut class = Class { text: String::new(), bounds: vec![0] };
        for word in words {
            class.text.push_str(before);
            class.text.push_str(word);
            class.bounds.push(class.text.len());
        }
        class
    }

    pub(super) fn len(&self) -> usize {
        self.bounds.len() - 1
    }

    /// The word with what stands before it.
    pub(super) fn piece(&self, index: usize) -> &str {
        &self.text[self.bounds[index]..self.bounds[index + 1]]
    }

    /// Bytes of a piece, on average, rounded up.
    pub(super) fn mean_bytes(&self) -> usize {
        self.text.len().div_ceil(self.len().max(1))
    }
}

/// Words by cost, for one place: the start of a message, or after another word.
#[derive(Debug)]
pub(super) struct Costed {
    /// Tokens of a word of the main class.
    pub(super) cost: u32,
    /// What text is made of.
    pub(super) main: Class,
    /// The other classes, for lengths that are no multiple of the cost.
    others: BTreeMap<u32, Class>,
}

impl Costed {
    /// The main class is the cheapest with [`ENOUGH`] words, else the largest; `None` without words.
    pub(super) fn new(before: &str, words_by_cost: &BTreeMap<u32, Vec<String>>) -> Option<Self> {
        let filled = || words_by_cost.iter().filter(|(cost, words)| **cost > 0 && !words.is_empty());
        let (&cost, words) = filled()
            .find(|(_, words)| words.len() >= ENOUGH)
            .or_else(|| filled().max_by_key(|(cost, words)| (words.len(), std::cmp::Reverse(**cost))))?;
        let others = filled()
            .filter(|(other, _)| **other != cost)
            .map(|(&other, words)| (other, Class::new(before, words)))
            .collect();
        Some(Costed { cost, main: Class::new(before, words), others })
    }

    /// The class of this cost.
    pub(super) fn of_cost(&self, cost: u32) -> Option<&Class> {
        if cost == self.cost { Some(&self.main) } else { self.others.get(&cost) }
    }

    /// How many words of the main class, and one of which other, make this many tokens.
    pub(super) fn fill(&self, tokens: u32) -> Option<(u32, Option<&Class>)> {
        let (whole, rest) = (tokens / self.cost, tokens % self.cost);
        if rest == 0 {
            return Some((whole, None));
        }
        if let Some(class) = self.of_cost(rest) {
            return Some((whole, Some(class)));
        }
        Some((whole.checked_sub(1)?, Some(self.of_cost(self.cost + rest)?)))
    }
}
