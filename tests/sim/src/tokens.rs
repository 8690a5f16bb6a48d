//! The tokenizer: text to ids, remembered by content, because every turn sends its whole history again.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow};
use sha2::{Digest, Sha256};
use tokenizers::Tokenizer;

/// Most ids remembered in one generation of the memo; there are two, so at most twice this (32 MiB).
const MEMO_IDS: usize = 4 << 20;

/// The tokenizer in use.
pub(crate) struct Tokens {
    tokenizer: Tokenizer,
    memo: Mutex<Memo>,
}

impl Tokens {
    /// `builtin`, a tokenizer.json, or a folder that holds one.
    pub(crate) fn load(source: &str) -> Result<Self> {
        let mut tokenizer = if source == "builtin" {
            Tokenizer::from_bytes(BUILTIN).map_err(|e| anyhow!("{e}")).context("builtin tokenizer")?
        } else {
            let path = Path::new(source);
            let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
            let bytes = std::fs::read(&file).with_context(|| format!("tokenizer {}", file.display()))?;
            Tokenizer::from_bytes(bytes)
                .map_err(|e| anyhow!("{e}"))
                .with_context(|| format!("tokenizer {}", file.display()))?
        };
        // Some files carry limits made for training; a count must not be cut or filled up.
        tokenizer.with_truncation(None).map_err(|e| anyhow!("{e}"))?;
        tokenizer.with_padding(None);
        Ok(Self { tokenizer, memo: Mutex::default() })
    }

    /// Ids of `text` without special tokens.
    pub(crate) fn encode(&self, text: &str) -> Result<Arc<[u32]>> {
        let key = Memo::key(text);
        if let Some(ids) = self.lock_memo().get(&key) {
            return Ok(ids);
        }
        // Outside the lock: encoding a long text takes milliseconds.
        let ids: Arc<[u32]> = self.encode_fresh(text, false)?.into();
        self.lock_memo().put(key, Arc::clone(&ids));
        Ok(ids)
    }

    /// Ids of `text`, not remembered.
    pub(crate) fn encode_fresh(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding =
            self.tokenizer.encode_fast(text, special).map_err(|e| anyhow!("cannot tokenise: {e}"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The first id that is no token.
    pub(crate) fn vocabulary_end(&self) -> u32 {
        self.tokenizer.get_vocab(true).values().max().map_or(0, |id| id + 1)
    }

    /// Ordinary tokens (not special ones) as id and vocabulary string, by id.
    pub(crate) fn vocabulary(&self) -> Vec<(u32, String)> {
        let added = self.tokenizer.get_added_tokens_decoder();
        let mut tokens: Vec<_> = (self.tokenizer.get_vocab(false).into_iter())
            .filter(|(_, id)| !added.contains_key(id))
            .map(|(token, id)| (id, token))
            .collect();
        tokens.sort_unstable();
        tokens
    }

    /// The text that each of `ids` adds, with incomplete UTF-8 held back until it is complete, as
    /// streaming servers do. What is still incomplete at the end is dropped.
    pub(crate) fn pieces(&self, ids: &[u32]) -> Vec<String> {
        let mut stream = self.tokenizer.decode_stream(true);
        ids.iter()
            .map(|id| match stream.step(*id) {
                Ok(piece) => piece.unwrap_or_default(),
                Err(_) => {
                    // A decoder that rewrote text it had already given: start again from here.
                    stream = self.tokenizer.decode_stream(true);
                    stream.step(*id).ok().flatten().unwrap_or_default()
                }
            })
            .collect()
    }

    fn lock_memo(&self) -> std::sync::MutexGuard<'_, Memo> {
        self.memo.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Encodings by content, in two generations: when the young one is full it becomes the old one, and what
/// the old one held is forgotten unless it was used since.
#[derive(Default)]
struct Memo {
    young: HashMap<[u8; 32], Arc<[u32]>>,
    young_ids: usize,
    old: HashMap<[u8; 32], Arc<[u32]>>,
}

impl Memo {
    fn key(text: &str) -> [u8; 32] {
        Sha256::digest(text).into()
    }

    fn get(&mut self, key: &[u8; 32]) -> Option<Arc<[u32]>> {
        if let Some(ids) = self.young.get(key) {
            return Some(Arc::clone(ids));
        }
        let ids = self.old.remove(key)?;
        self.put(*key, Arc::clone(&ids));
        Some(ids)
    }

    fn put(&mut self, key: [u8; 32], ids: Arc<[u32]>) {
        // An entry costs about as much as 32 ids beside its own, so that many short texts are bounded too.
        let cost = ids.len() + 32;
        if self.young_ids + cost > MEMO_IDS {
            self.old = std::mem::take(&mut self.young);
            self.young_ids = 0;
        }
        self.young_ids += cost;
        self.young.insert(key, ids);
    }
}

/// A small byte-level BPE. The file is the repository's, the code that reads it is not shared.
const BUILTIN: &[u8] = include_bytes!("../../../benchd/assets/builtin-tokenizer.json");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_builtin_tokenizer_loads_and_remembers() {
        let tokens = Tokens::load("builtin").unwrap();
        let first = tokens.encode("some text, twice").unwrap();
        assert!(Arc::ptr_eq(&first, &tokens.encode("some text, twice").unwrap()));
        assert!(first.iter().all(|id| *id < tokens.vocabulary_end()));
    }

    #[test]
    fn pieces_join_to_the_text_and_split_characters_are_held_back() {
        let tokens = Tokens::load("builtin").unwrap();
        let text = "snow \u{2603} and \u{1F600} end";
        let pieces = tokens.pieces(&tokens.encode(text).unwrap());
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')));
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = format!("{:#}", Tokens::load("/nowhere/tokenizer.json").err().unwrap());
        assert!(error.contains("/nowhere/tokenizer.json"), "{error}");
    }

    #[test]
    fn the_memo_forgets_what_was_not_used_for_a_generation() {
        let mut memo = Memo::default();
        let big: Arc<[u32]> = vec![0; MEMO_IDS / 2].into();
        for n in 0..4u8 {
            memo.put([n; 32], Arc::clone(&big));
        }
        assert!(memo.get(&[0; 32]).is_none());
        assert!(memo.get(&[3; 32]).is_some());
        assert!(memo.young.len() + memo.old.len() <= 3);
    }
}
