//! A Hugging Face name → the path of its `tokenizer.json` in the local cache, downloaded if need be. Owns how long the
//! hub may keep silent.

use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;
use std::{env, thread};

use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};

use super::TokenizerError;

/// A hub that sends nothing for this long counts as unreachable. A slow download goes on as long as bytes arrive.
const PATIENCE: Duration = Duration::from_secs(10);

const FILE: &str = "tokenizer.json";

/// The hub and its local cache, as the environment describes them.
#[derive(Clone, Debug)]
pub(super) struct Hub {
    /// `HF_ENDPOINT`.
    pub(super) endpoint: String,
    /// `$HF_HOME/hub`.
    pub(super) cache: PathBuf,
    /// `HF_TOKEN`, else the file that the hub's own client keeps.
    pub(super) token: Option<String>,
    /// `HF_HUB_OFFLINE`: the cache alone is asked.
    pub(super) is_offline: bool,
    /// How long it may keep silent.
    pub(super) patience: Duration,
}

impl Hub {
    pub(super) fn from_env() -> Self {
        let set = |name| env::var(name).ok().filter(|value| !value.trim().is_empty());
        let home = set("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
            env::home_dir().unwrap_or_else(env::temp_dir).join(".cache").join("huggingface")
        });
        let cache = home.join("hub");
        Hub {
            endpoint: set("HF_ENDPOINT").map_or("https://huggingface.co".to_owned(), |endpoint| {
                endpoint.trim().trim_end_matches('/').to_owned()
            }),
            token: set("HF_TOKEN").or_else(|| Cache::new(cache.clone()).token()),
            cache,
            is_offline: set("HF_HUB_OFFLINE")
                .is_some_and(|value| ["1", "true", "yes", "on"].contains(&value.to_lowercase().as_str())),
            patience: PATIENCE,
        }
    }

    /// The file's path. Blocks until the download ends, fails or stalls.
    pub(super) fn fetch(&self, name: &str) -> Result<PathBuf, TokenizerError> {
        let failed = |reason: String| TokenizerError::Hub {
            name: name.to_owned(),
            endpoint: self.endpoint.clone(),
            reason,
        };
        if !is_name(name) {
            return Err(failed("this is not a name as the hub has them (owner/model)".to_owned()));
        }
        // "main" is spelled out because `Repo::model` would say the same only by default.
        let repo = Repo::with_revision(name.to_owned(), RepoType::Model, "main".to_owned());
        if let Some(path) = Cache::new(self.cache.clone()).repo(repo.clone()).get(FILE) {
            return Ok(path);
        }
        if self.is_offline {
            return Err(TokenizerError::Offline {
                name: name.to_owned(),
                cache: self.cache.display().to_string(),
            });
        }

        // The library has no timeouts. A thread that hangs is left behind; it ends with its connection.
        let (sender, news) = mpsc::channel();
        let hub = self.clone();
        thread::Builder::new()
            .name("hub".to_owned())
            .spawn(move || {
                let done = hub.download(repo, Heartbeat(sender.clone()));
                let _ = sender.send(News::Done(done));
            })
            .map_err(|error| failed(error.to_string()))?;
        loop {
            match news.recv_timeout(self.patience) {
                Ok(News::Alive) => {}
                Ok(News::Done(done)) => return done.map_err(|error| failed(reason(&error))),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(failed(format!("no answer in {} s", self.patience.as_secs_f64())));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(failed("its client failed".to_owned())),
            }
        }
    }

    fn download(&self, repo: Repo, progress: Heartbeat) -> Result<PathBuf, ApiError> {
        ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .with_progress(false)
            .build()?
            .repo(repo)
            .download_with_progress(FILE, progress)
    }
}

enum News {
    Alive,
    Done(Result<PathBuf, ApiError>),
}

/// Turns the library's progress reports into signs of life.
struct Heartbeat(Sender<News>);

impl Progress for Heartbeat {
    fn init(&mut self, _: usize, _: &str) {
        let _ = self.0.send(News::Alive);
    }

    fn update(&mut self, _: usize) {
        let _ = self.0.send(News::Alive);
    }

    fn finish(&mut self) {}
}

fn reason(error: &ApiError) -> String {
    let text = error.to_string();
    match error {
        ApiError::RequestError(_) if text.contains("401") || text.contains("403") => {
            format!("{text} (no such model, or one that needs an accepted licence and HF_TOKEN)")
        }
        ApiError::RequestError(_) if text.contains("404") => {
            format!("{text} (no such model, or it has no {FILE})")
        }
        _ => text,
    }
}

/// `model` or `owner/model`, of letters, digits, `-`, `_` and `.`; anything else would make another URL.
fn is_name(name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    parts.len() <= 2
        && parts.iter().all(|part| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::sync::{Arc, Mutex};

    fn hub(endpoint: String, home: &std::path::Path) -> Hub {
        Hub {
            endpoint,
            cache: home.join("hub"),
            token: Some("secret".to_owned()),
            is_offline: false,
            patience: Duration::from_secs(5),
        }
    }

    /// A hub that holds one file; returns its address and the requests it saw.
    fn one_file_hub(body: &'static str) -> (String, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut head = String::new();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                while reader.read_line(&mut head).unwrap() > 2 {}
                let is_known = head.starts_with("GET /owner/model/resolve/main/tokenizer.json ");
                let probe = head.contains("bytes=0-0");
                log.lock().unwrap().push(head);
                let size = body.len();
                let part = if probe { &body[..1] } else { body };
                let answer = if is_known {
                    format!(
                        "HTTP/1.1 206 Partial Content\r\nx-repo-commit: c0ffee\r\netag: \"abc\"\r\ncontent-range: bytes 0-{}/{size}\r\n\
                         content-length: {}\r\nconnection: close\r\n\r\n{part}",
                        part.len() - 1,
                        part.len()
                    )
                } else {
                    "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_owned()
                };
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        (endpoint, seen)
    }

    #[test]
    fn a_file_is_downloaded_once_with_the_token_and_then_found_offline() {
        let home = tempfile::tempdir().unwrap();
        let (endpoint, seen) = one_file_hub("{\"a\": 1}");
        let mut hub = hub(endpoint, home.path());
        let path = hub.fetch("owner/model").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "{\"a\": 1}");
        let requests = seen.lock().unwrap().clone();
        assert!(
            requests.iter().all(|r| r.to_lowercase().contains("authorization: bearer secret")),
            "{requests:?}"
        );

        hub.is_offline = true;
        hub.endpoint = "http://127.0.0.1:9".to_owned();
        assert!(hub.fetch("owner/model").is_ok());
        assert!(matches!(hub.fetch("owner/other"), Err(TokenizerError::Offline { .. })));
    }

    #[test]
    fn an_unknown_name_says_so_and_what_to_do() {
        let home = tempfile::tempdir().unwrap();
        let (endpoint, _) = one_file_hub("{}");
        let error = hub(endpoint, home.path()).fetch("owner/none").unwrap_err().to_string();
        for part in ["owner/none", "404", "no such model", "HF_ENDPOINT", "builtin"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }

    #[test]
    fn a_silent_hub_is_given_up() {
        let home = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut hub = hub(format!("http://{}", listener.local_addr().unwrap()), home.path());
        hub.patience = Duration::from_millis(100);
        let error = hub.fetch("owner/model").unwrap_err().to_string();
        assert!(error.contains("no answer in 0.1 s"), "{error}");
    }

    #[test]
    fn what_is_not_a_name_is_not_sent() {
        for name in ["", "a/b/c", "a b", "../x", "a/..", "http://x/y", "a?b"] {
            assert!(!is_name(name), "{name}");
        }
        for name in ["gpt2", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1_8B"] {
            assert!(is_name(name), "{name}");
        }
    }
}
