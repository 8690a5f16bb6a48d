//! Text → token counts, on this machine. Owns the loaded tokenizer and its identity for reports; `source` says where
//! one comes from, `hub` fetches it. Used by the word finder, the prompt makers and the reply counter.

mod hub;
mod source;

use std::fmt;
use std::sync::{Arc, OnceLock};

use sha2::{Digest, Sha256};

pub use source::{Resolved, Source, TokenizerError, load, resolve};

const BUILTIN_JSON: &[u8] = include_bytes!("../../../assets/builtin-tokenizer.json");

/// A loaded tokenizer. Cloning shares it.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    tokenizer: tokenizers::Tokenizer,
    label: String,
    sha256: String,
}

impl Tokenizer {
    /// The small byte-level BPE in the binary.
    pub fn builtin() -> Self {
        static BUILTIN: OnceLock<Tokenizer> = OnceLock::new();
        BUILTIN
            .get_or_init(|| {
                Tokenizer::from_json("builtin", BUILTIN_JSON).expect("the embedded JSON is tested")
            })
            .clone()
    }

    /// From the bytes of a `tokenizer.json`; `label` names it in reports and errors.
    pub fn from_json(label: impl Into<String>, json: &[u8]) -> Result<Self, TokenizerError> {
        let label = label.into();
        let unreadable = |reason: String| TokenizerError::Unreadable { label: label.clone(), reason };
        let mut tokenizer =
            tokenizers::Tokenizer::from_bytes(json).map_err(|error| unreadable(error.to_string()))?;
        // Settings for model inputs, which would cut or fill up what is only to be counted.
        tokenizer.with_truncation(None).map_err(|error| unreadable(error.to_string()))?;
        tokenizer.with_padding(None);
        // Some models fail on characters they have no token for; better here than in the middle of a run.
        tokenizer
            .encode_fast("probe É 漢 \u{1f642} \u{7f}\n", false)
            .map_err(|error| unreadable(format!("it cannot encode any text: {error}")))?;
        let sha256 = Sha256::digest(json).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Tokenizer(Arc::new(Inner { tokenizer, label, sha256 })))
    }

    /// Tokens of the text, without any that a model would add at its ends.
    pub fn count(&self, text: &str) -> usize {
        self.encoding(text).len()
    }

    /// The text's token ids, without any that a model would add at its ends.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        self.encoding(text).get_ids().to_vec()
    }

    /// Where it came from, as the user wrote it: `builtin`, a path, a Hugging Face name.
    pub fn label(&self) -> &str {
        &self.0.label
    }

    /// SHA-256 of its JSON, in hexadecimal digits.
    pub fn sha256(&self) -> &str {
        &self.0.sha256
    }

    /// The library's own object, for the word finder.
    pub(crate) fn inner(&self) -> &tokenizers::Tokenizer {
        &self.0.tokenizer
    }

    fn encoding(&self, text: &str) -> tokenizers::Encoding {
        self.0.tokenizer.encode_fast(text, false).expect("unknown characters were probed when it was loaded")
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("label", &self.0.label).field("sha256", &self.0.sha256).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_builtin_tokenizer_counts_what_it_encodes_and_loses_no_byte() {
        let tokenizer = Tokenizer::builtin();
        let text = "Call me Ishmael. naïve 漢字 \u{1f642}\n\ttab";
        let ids = tokenizer.encode(text);
        assert_eq!(tokenizer.count(text), ids.len());
        assert_eq!(tokenizer.inner().decode(&ids, false).unwrap(), text);
        assert_eq!(tokenizer.count(""), 0);
    }

    #[test]
    fn truncation_and_padding_in_the_file_do_not_change_counts() {
        let mut json: serde_json::Value = serde_json::from_slice(BUILTIN_JSON).unwrap();
        json["truncation"] = serde_json::json!({
            "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0 });
        json["padding"] = serde_json::json!({
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "x" });
        let tokenizer = Tokenizer::from_json("cut", json.to_string().as_bytes()).unwrap();
        let text = "one two three four five six seven eight";
        assert_eq!(tokenizer.encode(text), Tokenizer::builtin().encode(text));
    }

    #[test]
    fn what_a_model_would_add_is_not_counted() {
        let mut json: serde_json::Value = serde_json::from_slice(BUILTIN_JSON).unwrap();
        json["added_tokens"] = serde_json::json!([{ "id": 6144, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true }]);
        json["post_processor"] = serde_json::json!({ "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [6144], "tokens": ["<s>"]}} });
        let tokenizer = Tokenizer::from_json("bos", json.to_string().as_bytes()).unwrap();
        assert_eq!(tokenizer.encode("the whale"), Tokenizer::builtin().encode("the whale"));
    }

    #[test]
    fn a_model_that_fails_on_unknown_words_is_refused_at_load() {
        let json = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
            "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
            "model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"missing"}}"#;
        let error = Tokenizer::from_json("words.json", json.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("words.json") && error.contains("cannot encode any text"), "{error}");
    }

    #[test]
    fn the_identity_is_the_hash_of_the_json() {
        let tokenizer = Tokenizer::builtin();
        assert_eq!(tokenizer.label(), "builtin");
        assert_eq!(tokenizer.sha256().len(), 64);
        assert!(tokenizer.sha256().bytes().all(|b| b.is_ascii_hexdigit()));
    }
}
