//! Trains the built-in tokenizer: `assets/corpus/*.txt` → `assets/builtin-tokenizer.json`, the same bytes each time.
//! Frequent words are also fed alone, with and without a space before them, so that both forms become single tokens.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;

use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{
    DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerBuilder,
};

const VOCABULARY: usize = 6144;
/// Words that shall be one token in both forms. More would not fit beside the fragments they are merged from.
const WORDS: usize = 1900;
/// How often each of them is fed alone in each form: enough to win over fragments that are merely common.
const WEIGHT: usize = 200;

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    // Merges with equal counts would otherwise be found in an order that depends on the threads.
    tokenizers::utils::parallelism::set_parallelism(false);

    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
    let mut paths: Vec<_> = fs::read_dir(assets.join("corpus"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_, std::io::Error>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
    paths.sort();
    let mut corpus = String::new();
    for path in paths {
        corpus.push_str(&fs::read_to_string(path)?);
    }

    let mut input: Vec<String> = corpus.lines().map(str::to_owned).collect();
    for word in frequent_words(&corpus) {
        input.extend(std::iter::repeat_n(word.to_owned(), WEIGHT));
        input.extend(std::iter::repeat_n(format!(" {word}"), WEIGHT));
    }

    let mut tokenizer = TokenizerBuilder::<
        BPE,
        NormalizerWrapper,
        PreTokenizerWrapper,
        PostProcessorWrapper,
        DecoderWrapper,
    >::new()
    .with_model(BPE::default())
    .with_pre_tokenizer(Some(ByteLevel::new(false, false, true).into()))
    .with_decoder(Some(ByteLevel::default().into()))
    .build()?;
    let mut trainer = BpeTrainerBuilder::new()
        .vocab_size(VOCABULARY)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect::<HashSet<char>>())
        .build();
    tokenizer.train(&mut trainer, input.into_iter())?;

    let mut json = tokenizer.to_string(false)?;
    json.push('\n');
    fs::write(assets.join("builtin-tokenizer.json"), json)?;
    Ok(())
}

/// Lower-case words of two letters or more, the most frequent first.
fn frequent_words(corpus: &str) -> Vec<&str> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for word in corpus.split(|c: char| !c.is_ascii_alphabetic()) {
        if word.len() >= 2 && word.bytes().all(|b| b.is_ascii_lowercase()) {
            *counts.entry(word).or_default() += 1;
        }
    }
    let mut words: Vec<_> = counts.into_iter().collect();
    words.sort_by_key(|&(word, count)| (std::cmp::Reverse(count), word));
    words.into_iter().take(WORDS).map(|(word, _)| word).collect()
}
