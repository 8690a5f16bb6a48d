//! What the user asked for (`--tokenizer`, else the model's name) → a loaded tokenizer, or the server's own, or one
//! sentence that says what failed and what to do. Never silently another tokenizer than the one asked for.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::{env, fmt, fs, io};

use super::Tokenizer;
use super::hub::Hub;

/// Where a tokenizer comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The one in the binary.
    Builtin,
    /// A `tokenizer.json`, or a folder that holds one.
    File(PathBuf),
    /// A name on the Hugging Face hub, such as `Qwen/Qwen3-8B`.
    HuggingFace(String),
    /// The server's own `/tokenize`.
    Server,
}

/// What a source came to.
#[derive(Clone, Debug)]
pub enum Resolved {
    /// Loaded here.
    Local(Tokenizer),
    /// The server has to be asked, over HTTP, before load.
    Server {
        /// Absent when the user asked for `server`; else why the model's own tokenizer could not be had, to be shown.
        /// If the server does not answer either, [`TokenizerError::without_server`] makes the error.
        instead_of: Option<TokenizerError>,
    },
}

/// Why there is no tokenizer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// No such path, or not readable.
    #[error("cannot read the tokenizer {path}: {reason}; name a tokenizer.json or a folder that holds one")]
    File {
        /// As the user wrote it, with `~` resolved.
        path: String,
        /// The system's words.
        reason: String,
    },
    /// A file that is not a usable tokenizer.
    #[error(
        "the tokenizer {label} cannot be used: {reason}; it must be a Hugging Face tokenizer.json (the kind with \
         \"version\", \"model\" and \"pre_tokenizer\" in it)"
    )]
    Unreadable {
        /// Where it came from.
        label: String,
        /// The library's words.
        reason: String,
    },
    /// The hub did not give it.
    #[error(
        "the tokenizer {name} could not be had from {endpoint}: {reason}; name a tokenizer.json or its folder, or a \
         Hugging Face name that can be reached (HF_ENDPOINT, HF_TOKEN, HF_HOME), or use --tokenizer builtin"
    )]
    Hub {
        /// The name asked for.
        name: String,
        /// The hub's address.
        endpoint: String,
        /// What it answered, or that it did not.
        reason: String,
    },
    /// `HF_HUB_OFFLINE` is set and the cache does not hold it.
    #[error(
        "the tokenizer {name} is not in the Hugging Face cache {cache} and HF_HUB_OFFLINE is set; name a tokenizer.json \
         or its folder, or unset HF_HUB_OFFLINE, or use --tokenizer builtin"
    )]
    Offline {
        /// The name asked for.
        name: String,
        /// Folder of the cache.
        cache: String,
    },
    /// Nothing was asked for, and neither the model's name nor the server gave one.
    #[error(
        "no tokenizer for the model {model}: as a Hugging Face name: {hub}; from the server: {server}; give --tokenizer \
         a tokenizer.json or its folder, a Hugging Face name (with HF_ENDPOINT if the hub is elsewhere), or builtin"
    )]
    None {
        /// The model's name.
        model: String,
        /// Why its name did not lead to one.
        hub: String,
        /// Why the server did not.
        server: String,
    },
}

impl Source {
    /// `builtin`; `server`; a path, which exists or begins with `/`, `./`, `../` or `~`; else a Hugging Face name.
    pub fn parse(text: &str) -> Self {
        match text {
            "builtin" => Source::Builtin,
            "server" => Source::Server,
            _ if is_marked_path(text) || Path::new(text).exists() => Source::File(expand_home(text)),
            _ => Source::HuggingFace(text.to_owned()),
        }
    }

    /// What stands for a model when no tokenizer was named. Servers that were given a folder call the model by its path.
    fn of_model(model: &str) -> Self {
        if is_marked_path(model) {
            Source::File(expand_home(model))
        } else {
            Source::HuggingFace(model.to_owned())
        }
    }
}

impl FromStr for Source {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Source::parse(text))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Builtin => f.write_str("builtin"),
            Source::Server => f.write_str("server"),
            Source::File(path) => path.display().fmt(f),
            Source::HuggingFace(name) => f.write_str(name),
        }
    }
}

/// The tokenizer that the user named, or else the model's; when the latter cannot be had, the server's. Blocks on
/// files and the network.
pub fn resolve(asked: Option<&str>, model: &str) -> Result<Resolved, TokenizerError> {
    resolve_with(asked, model, &Hub::from_env())
}

/// Loads a source; blocks on files and the network.
pub fn load(source: &Source) -> Result<Resolved, TokenizerError> {
    load_with(source, &Hub::from_env())
}

fn resolve_with(asked: Option<&str>, model: &str, hub: &Hub) -> Result<Resolved, TokenizerError> {
    if let Some(asked) = asked {
        return load_with(&Source::parse(asked), hub);
    }
    Ok(load_with(&Source::of_model(model), hub)
        .unwrap_or_else(|error| Resolved::Server { instead_of: Some(error) }))
}

fn load_with(source: &Source, hub: &Hub) -> Result<Resolved, TokenizerError> {
    let tokenizer = match source {
        Source::Server => return Ok(Resolved::Server { instead_of: None }),
        Source::Builtin => Tokenizer::builtin(),
        Source::File(path) => from_path(path, source)?,
        Source::HuggingFace(name) => from_path(&hub.fetch(name)?, source)?,
    };
    Ok(Resolved::Local(tokenizer))
}

fn from_path(path: &Path, source: &Source) -> Result<Tokenizer, TokenizerError> {
    let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    let json = fs::read(&file).map_err(|error| TokenizerError::File {
        path: file.display().to_string(),
        reason: match error.kind() {
            io::ErrorKind::NotFound => "there is no such file".to_owned(),
            _ => error.to_string(),
        },
    })?;
    Tokenizer::from_json(source.to_string(), &json)
}

impl TokenizerError {
    /// The error when the server, asked in place of the model's own tokenizer, has no usable `/tokenize` either.
    pub fn without_server(self, model: &str, server: impl fmt::Display) -> Self {
        let hub = match self {
            // Their advice is given once, by the sentence that this becomes part of.
            TokenizerError::Hub { endpoint, reason, .. } => format!("{endpoint}: {reason}"),
            TokenizerError::Offline { cache, .. } => format!("not in {cache}, and HF_HUB_OFFLINE is set"),
            TokenizerError::File { path, reason } => format!("{path}: {reason}"),
            TokenizerError::Unreadable { reason, .. } => reason,
            none @ TokenizerError::None { .. } => return none,
        };
        TokenizerError::None { model: model.to_owned(), hub, server: server.to_string() }
    }
}

fn is_marked_path(text: &str) -> bool {
    matches!(text, "." | "..") || ["/", "./", "../", "~"].iter().any(|mark| text.starts_with(mark))
}

fn expand_home(text: &str) -> PathBuf {
    match (text.strip_prefix('~'), env::home_dir()) {
        (Some(""), Some(home)) => home,
        (Some(rest), Some(home)) if rest.starts_with('/') => home.join(&rest[1..]),
        _ => PathBuf::from(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn no_hub() -> Hub {
        Hub {
            endpoint: "http://127.0.0.1:9".to_owned(),
            cache: PathBuf::from("/nonexistent/hub"),
            token: None,
            is_offline: true,
            patience: Duration::from_secs(1),
        }
    }

    #[test]
    fn paths_names_and_keywords_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let existing = folder.path().to_str().unwrap();
        assert_eq!(Source::parse("builtin"), Source::Builtin);
        assert_eq!(Source::parse("server"), Source::Server);
        assert_eq!(Source::parse(existing), Source::File(existing.into()));
        for path in ["./t.json", "../t", "/no/such", "."] {
            assert_eq!(Source::parse(path), Source::File(path.into()));
        }
        assert!(matches!(Source::parse("~/t.json"), Source::File(path) if path.ends_with("t.json")));
        assert_eq!(Source::parse("Qwen/Qwen3-8B"), Source::HuggingFace("Qwen/Qwen3-8B".into()));
        assert_eq!(Source::parse("gpt2"), Source::HuggingFace("gpt2".into()));
    }

    #[test]
    fn a_folder_and_the_file_in_it_give_the_same_tokenizer() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        fs::write(&file, super::super::BUILTIN_JSON).unwrap();
        for path in [folder.path(), &file] {
            let Resolved::Local(tokenizer) = load(&Source::File(path.to_owned())).unwrap() else { panic!() };
            assert_eq!(tokenizer.sha256(), Tokenizer::builtin().sha256());
            assert_eq!(tokenizer.label(), path.to_str().unwrap());
        }
    }

    #[test]
    fn a_named_tokenizer_that_fails_is_an_error_and_never_another_one() {
        let error = resolve_with(Some("some/model"), "m", &no_hub()).unwrap_err();
        assert!(matches!(error, TokenizerError::Offline { .. }));
        let error = resolve_with(Some("/no/such/tokenizer.json"), "m", &no_hub()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot read the tokenizer /no/such/tokenizer.json: there is no such file; name a tokenizer.json or a \
             folder that holds one"
        );
    }

    #[test]
    fn without_a_named_one_the_model_then_the_server_then_three_ways_out() {
        let Resolved::Server { instead_of: Some(why) } = resolve_with(None, "some/model", &no_hub()).unwrap()
        else {
            panic!("the server comes next")
        };
        let error = why.without_server("some/model", "404 Not Found").to_string();
        for part in
            ["some/model", "HF_HUB_OFFLINE", "404 Not Found", "tokenizer.json", "HF_ENDPOINT", "builtin"]
        {
            assert!(error.contains(part), "{part} in {error}");
        }
    }

    #[test]
    fn a_model_that_is_called_like_a_keyword_does_not_choose_it() {
        for model in ["builtin", "server"] {
            let resolved = resolve_with(None, model, &no_hub()).unwrap();
            assert!(matches!(resolved, Resolved::Server { instead_of: Some(_) }));
        }
    }

    #[test]
    fn a_model_named_by_its_folder_uses_the_tokenizer_in_it() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("tokenizer.json"), super::super::BUILTIN_JSON).unwrap();
        let resolved = resolve_with(None, folder.path().to_str().unwrap(), &no_hub()).unwrap();
        assert!(matches!(resolved, Resolved::Local(_)));
    }

    #[test]
    fn a_file_that_is_no_tokenizer_says_so() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
        let error = load(&Source::File(folder.path().to_owned())).unwrap_err();
        assert!(matches!(error, TokenizerError::Unreadable { .. }), "{error}");
    }
}
