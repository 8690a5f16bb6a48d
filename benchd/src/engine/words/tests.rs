//! Exactness, stability and difference of the texts, for the built-in tokenizer, small ones made here, and those in the
//! folder that `BENCHD_TOKENIZERS` names, one sub-folder each.

use std::collections::HashSet;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::engine::tokenizer::{Resolved, Source, Tokenizer, load};

fn builtin() -> &'static Words {
    static WORDS: OnceLock<Words> = OnceLock::new();
    WORDS.get_or_init(|| Words::find(&Tokenizer::builtin()).unwrap())
}

fn key(seed: u64, session: u64) -> Key {
    Key { seed, purpose: Purpose::User, session, turn: 1 }
}

fn text(words: &Words, key: Key, opening: Opening, tokens: u32) -> String {
    let mut text = String::new();
    words.append(&mut text, key, opening, tokens).unwrap();
    text
}

fn tokenizer(name: &str, parts: Value) -> Tokenizer {
    let mut json = json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null });
    json.as_object_mut().unwrap().extend(parts.as_object().unwrap().clone());
    Tokenizer::from_json(name, json.to_string().as_bytes()).unwrap()
}

/// Merges that build each of the made words, and then join `mark` to it.
fn merges_of(words: &[String], mark: &str) -> (Vec<String>, Vec<Value>) {
    let mut vocabulary: Vec<String> = ["<unk>".to_owned(), mark.to_owned()].into();
    vocabulary.extend((b'a'..=b'z').chain(b'A'..=b'Z').map(|b| char::from(b).to_string()));
    let (mut known, mut merges) = (HashSet::new(), Vec::new());
    let mut merge = |left: &str, right: &str| {
        let whole = format!("{left}{right}");
        if known.insert(whole.clone()) {
            merges.push(json!([left, right]));
            vocabulary.push(whole);
        }
    };
    for word in words {
        for at in [0, 2, 4] {
            merge(&word[at..=at], &word[at + 1..at + 2]);
        }
        merge(&word[..2], &word[2..4]);
        merge(&word[..4], &word[4..]);
    }
    for word in words {
        merge(mark, word);
    }
    (vocabulary, merges)
}

/// Words of three syllables, each from an alphabet of its place, so that merges do not compete.
fn made_words(count: usize) -> Vec<String> {
    let syllable = |consonants: &str, digit: usize| {
        let consonant = consonants.chars().nth(digit / 5).unwrap();
        format!("{consonant}{}", ["a", "e", "i", "o", "u"][digit % 5])
    };
    let word =
        |n: usize| syllable("bd", n / 100 % 10) + &syllable("fg", n / 10 % 10) + &syllable("kl", n % 10);
    (0..count).map(word).collect()
}

fn ids(vocabulary: &[String]) -> Value {
    vocabulary
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), json!(id)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// As Llama 2's: a space before the text, spaces as "▁", no pre-tokenizer.
fn sentencepiece_like() -> Tokenizer {
    let (vocabulary, merges) = merges_of(&made_words(400), "▁");
    tokenizer(
        "sentencepiece-like",
        json!({
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": ids(&vocabulary),
                "merges": merges} }),
    )
}

/// As BERT's: case folded, no spaces in tokens.
fn wordpiece_like() -> Tokenizer {
    let mut vocabulary = vec!["[UNK]".to_owned()];
    vocabulary.extend(made_words(500));
    vocabulary
        .extend((b'a'..=b'z').flat_map(|b| [char::from(b).to_string(), format!("##{}", char::from(b))]));
    tokenizer(
        "wordpiece-like",
        json!({
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                "strip_accents": null, "lowercase": true},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": ids(&vocabulary)} }),
    )
}

/// Each character is a token: no word after a space has fewer than two.
fn character_level() -> Tokenizer {
    let vocabulary: Vec<String> = ["<unk>", "▁"]
        .into_iter()
        .map(str::to_owned)
        .chain((b'a'..=b'z').map(|b| char::from(b).to_string()))
        .collect();
    tokenizer(
        "character-level",
        json!({
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": ids(&vocabulary),
                "merges": []} }),
    )
}

fn local_families() -> Vec<Tokenizer> {
    let Some(folder) = std::env::var_os("BENCHD_TOKENIZERS").map(PathBuf::from) else { return Vec::new() };
    let mut paths: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.join("tokenizer.json").exists());
    paths.sort();
    assert!(!paths.is_empty(), "BENCHD_TOKENIZERS={} holds no tokenizer", folder.display());
    let load = |path| match load(&Source::File(path)).unwrap() {
        Resolved::Local(tokenizer) => tokenizer,
        Resolved::Server { .. } => unreachable!(),
    };
    paths.into_iter().map(load).collect()
}

fn assert_exact(tokenizer: &Tokenizer, words: &Words, lengths: impl Iterator<Item = u32>) {
    for (session, tokens) in (0..).zip(lengths) {
        for opening in [Opening::Message, Opening::UniqueMessage] {
            let text = text(words, key(7, session), opening, tokens);
            assert_eq!(tokenizer.count(&text), tokens as usize, "{}: {text}", tokenizer.label());
        }
        let mut system = String::new();
        let made = words.push_system(&mut system, 7, tokens.div_ceil(2), session, tokens / 2);
        assert_eq!(tokenizer.count(&system), made as usize, "{}: {system}", tokenizer.label());
    }
}

#[test]
fn text_of_the_builtin_tokenizer_is_exact_at_every_length() {
    assert_exact(&Tokenizer::builtin(), builtin(), (1..200).chain((200..=2000).step_by(37)));
}

#[test]
fn the_builtin_tokenizer_has_thousands_of_words() {
    let counts = builtin().counts();
    assert!(counts.after_space >= 2_000 && counts.at_start >= 2_000, "{counts:?}");
    assert_eq!(counts.tokens_a_word, 1);
}

#[test]
fn text_of_other_kinds_of_tokenizers_is_exact() {
    for tokenizer in [sentencepiece_like(), wordpiece_like()] {
        let words = Words::find(&tokenizer).unwrap();
        let counts = words.counts();
        assert!(counts.after_space >= 400 && counts.at_start >= 400, "{}: {counts:?}", tokenizer.label());
        assert_exact(&tokenizer, &words, (1..100).chain([999, 1500]));
    }
}

#[test]
fn text_of_the_tokenizers_in_the_named_folder_is_exact() {
    for tokenizer in local_families() {
        let words = Words::find(&tokenizer).unwrap();
        let counts = words.counts();
        assert!(counts.after_space >= 9_000 && counts.at_start >= 4_000, "{}: {counts:?}", tokenizer.label());
        assert_exact(&tokenizer, &words, (1..=100).chain((1..=100).map(|i| i * 15)));
        for opening in ["\n", ">\n", "x: ", "user\n\n"] {
            // A template's own text before the message costs what it costs alone.
            let message = text(&words, key(3, 5), Opening::UniqueMessage, 300);
            let whole = format!("{opening}{message}");
            let template =
                tokenizer.count(&format!("{opening}{}", text(&words, key(4, 9), Opening::Message, 1))) - 1;
            assert_eq!(tokenizer.count(&whole), template + 300, "{}: {opening:?}", tokenizer.label());
        }
        let mut texts_asked = 0;
        let oracle = Words::from_oracle(|texts: &[String]| {
            texts_asked += texts.len();
            Ok::<_, Infallible>(texts.iter().map(|text| 1 + tokenizer.count(text)).collect())
        });
        let oracle = oracle.unwrap();
        assert_exact(&tokenizer, &oracle, [1, 10, 100, 1000].into_iter());
        println!(
            "{}: {counts:?}; as a server: {:?} from {texts_asked} texts",
            tokenizer.label(),
            oracle.counts()
        );
    }
}

#[test]
fn a_character_level_tokenizer_gets_words_of_several_tokens_and_says_what_it_cannot() {
    let tokenizer = character_level();
    let words = Words::find(&tokenizer).unwrap();
    assert!(words.counts().tokens_a_word > 1);
    assert_exact(&tokenizer, &words, (1..100).chain([1000, 1001, 1002, 1003]));
    // A space and a letter are two tokens.
    let error = words.check(Opening::UniqueContinuation, 1).unwrap_err();
    assert_eq!(error, WordsError::Length { asked: 1, nearest: 0 });
    assert!(error.to_string().contains("1 off"), "{error}");
    assert_eq!(words.push_system(&mut String::new(), 1, 10, 1, 1), 10);
}

#[test]
fn a_tokenizer_that_knows_no_word_is_refused() {
    let tokenizer = tokenizer(
        "unknown",
        json!({ "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"} }),
    );
    let error = Words::find(&tokenizer).unwrap_err();
    assert!(matches!(error, WordsError::TooFew { .. }), "{error}");
}

#[test]
fn words_that_merge_with_their_neighbours_are_dropped() {
    let (mut vocabulary, mut merges) = merges_of(&made_words(400), "▁");
    // The first word followed by any of a hundred others is one token.
    for second in &made_words(100)[1..] {
        merges.push(json!(["▁bafaka", format!("▁{second}")]));
        vocabulary.push(format!("▁bafaka▁{second}"));
    }
    let tokenizer = tokenizer(
        "merging",
        json!({
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": ids(&vocabulary),
                "merges": merges} }),
    );
    assert_eq!(tokenizer.count("x bafaka bafaka"), 3);
    assert_eq!(tokenizer.count("x bafaka bafake"), 2);
    let words = Words::find(&tokenizer).unwrap();
    let main = &words.after.main;
    assert!((0..main.len()).all(|i| main.piece(i) != " bafaka"));
    assert_exact(&tokenizer, &words, (1..=1500).step_by(50));
}

#[test]
fn a_server_is_asked_few_questions() {
    let tokenizer = Tokenizer::builtin();
    let (mut calls, mut asked) = (0, 0);
    // As a server that adds a token to every text.
    let words = Words::from_oracle(|texts: &[String]| {
        calls += 1;
        asked += texts.len();
        Ok::<_, Infallible>(texts.iter().map(|text| 1 + tokenizer.count(text)).collect())
    });
    let words = words.unwrap();
    assert_exact(&tokenizer, &words, (1..100).chain([1500]));
    assert!(calls <= 20 && asked <= 100, "{calls} calls, {asked} texts");
    assert!(words.counts().at_start >= 900, "{:?}", words.counts());
}

#[test]
fn a_server_whose_tokenizer_lacks_some_common_words_is_asked_until_the_rest_is_known() {
    // Every tenth of the words takes two tokens.
    let is_dear = |word: &str| word.bytes().map(u32::from).sum::<u32>() % 10 == 0;
    let count = |text: &String| {
        text.split([' ', '\n']).map(|word| 1 + usize::from(is_dear(word))).sum::<usize>()
            + text.matches('\n').count()
    };
    let mut asked = 0;
    let words = Words::from_oracle(|texts: &[String]| {
        asked += texts.len();
        Ok::<_, Infallible>(texts.iter().map(count).collect())
    });
    let words = words.unwrap();
    assert!(words.counts().after_space >= 256, "{:?}", words.counts());
    assert!(asked < 1000, "{asked}");
    let main = &words.after.main;
    assert!((0..main.len()).all(|i| !is_dear(main.piece(i).trim_start())));
}

#[test]
fn a_server_that_counts_otherwise_is_refused() {
    let bytes =
        Words::from_oracle(|texts: &[String]| Ok::<_, Infallible>(texts.iter().map(String::len).collect()));
    assert!(matches!(bytes, Err(OracleError::Words(WordsError::TooFew { .. }))), "{bytes:?}");
    let short = Words::from_oracle(|_: &[String]| Ok::<_, Infallible>(vec![1]));
    assert!(matches!(short, Err(OracleError::Answer { texts: 3, counts: 1 })), "{short:?}");
    let silent = Words::from_oracle(|_: &[String]| Err("404"));
    assert_eq!(silent.unwrap_err().to_string(), "404");
}

#[test]
fn sessions_begin_with_different_words_until_the_list_is_used_up() {
    let words = builtin();
    let Counts { at_start, after_space, .. } = words.counts();
    for (opening, distinct) in
        [(Opening::UniqueMessage, at_start), (Opening::UniqueContinuation, after_space)]
    {
        let first = |session| text(words, key(11, session), opening, 1);
        let firsts: HashSet<String> = (0..distinct as u64).map(first).collect();
        assert_eq!(firsts.len(), distinct, "{opening:?}");
        assert!(firsts.contains(&first(distinct as u64)));
    }
}

#[test]
fn past_the_list_the_next_words_tell_sessions_apart() {
    let list = |count| BTreeMap::from([(1, made_words(count))]);
    let words = Words::new("small", &list(5), &list(3)).unwrap();
    for (opening, first) in [(Opening::UniqueMessage, 5), (Opening::UniqueContinuation, 3)] {
        for (tokens, sessions) in [(1, first), (2, first * 3), (3, first * 9), (6, first * 243)] {
            let texts: HashSet<_> = (0..sessions).map(|n| text(&words, key(1, n), opening, tokens)).collect();
            assert_eq!(texts.len() as u64, sessions, "{opening:?} {tokens}");
        }
    }
}

#[test]
fn the_text_of_a_key_stays_the_same_across_versions() {
    let mut system = String::new();
    builtin().push_system(&mut system, 42, 6, 3, 6);
    let mut user = String::new();
    builtin().push_user(&mut user, 42, 3, 2, 6);
    assert_eq!((system.as_str(), user.as_str()), GOLDEN_TEXTS);
}

const GOLDEN_TEXTS: (&str, &str) = (
    "known exasperated naturalists just CHAPTER eh thus mouth passeng at holy differ",
    "shipped ref appro lat after presence",
);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn any_text_is_exact_and_a_longer_one_begins_with_it(
        seed: u64, session in 0..1_000_000_u64, turn in 0..50_u32, tokens in 0..1000_u32, more in 0..1000_u32,
        opening in prop_oneof![
            Just(Opening::Message), Just(Opening::UniqueMessage), Just(Opening::UniqueContinuation)],
    ) {
        let key = Key { seed, purpose: Purpose::UniqueSystem, session, turn };
        let short = text(builtin(), key, opening, tokens);
        prop_assert_eq!(Tokenizer::builtin().count(&short), tokens as usize);
        let long = text(builtin(), key, opening, tokens + more);
        prop_assert!(long.starts_with(&short));
        prop_assert_eq!(serde_json::to_string(&long).unwrap(), format!("\"{long}\""));
    }

    #[test]
    fn every_part_of_a_key_changes_the_text(
        seed: u64, session in 0..1000_u64, turn in 0..50_u32, step in 1..50_u32,
    ) {
        let base = Key { seed, purpose: Purpose::User, session, turn };
        let others = [
            Key { seed: seed.wrapping_add(u64::from(step)), ..base },
            Key { purpose: Purpose::SharedSystem, ..base },
            Key { session: session + u64::from(step), ..base },
            Key { turn: turn + step, ..base },
        ];
        let first = text(builtin(), base, Opening::Message, 12);
        for other in others {
            prop_assert_ne!(&first, &text(builtin(), other, Opening::Message, 12));
        }
    }
}
