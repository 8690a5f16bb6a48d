//! A running benchsim, and a raw HTTP client that hides nothing: std sockets only.

#![allow(dead_code, clippy::unwrap_used)] // each test file uses its part, and may panic

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};

use serde_json::{Value, json};

/// The template of the acceptance tests: replies hit the prefix cache because B = C.
pub(crate) const TEMPLATE: [&str; 6] =
    ["--template-request", "7", "--template-message", "5", "--template-reply", "5"];

pub(crate) struct Sim {
    child: Child,
    lifeline: Option<ChildStdin>,
    pub(crate) address: String,
    pub(crate) pid: u32,
    truth: PathBuf,
    _folder: tempfile::TempDir,
}

impl Sim {
    pub(crate) fn start(args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let truth = folder.path().join("truth.jsonl");
        let mut child = Command::new(env!("CARGO_BIN_EXE_benchsim"))
            .args(["--lifeline", "--truth", truth.to_str().unwrap()])
            .args(["--ttft-ms", "1", "--prefill-us-per-token", "0", "--itl-ms", "0.2"])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).expect("the first line says where it listens");
        let address = ready["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
        let pid = u32::try_from(ready["pid"].as_u64().unwrap()).unwrap();
        let lifeline = child.stdin.take();
        Self { child, lifeline, address, pid, truth, _folder: folder }
    }

    pub(crate) fn connect(&self) -> Client {
        Client::new(&self.address)
    }

    /// Lets go of the lifeline, and reads the truth log: header, requests, end.
    pub(crate) fn end(mut self) -> Truth {
        drop(self.lifeline.take());
        self.wait()
    }

    /// The truth log of a process that ends by itself.
    pub(crate) fn wait(mut self) -> Truth {
        assert!(self.child.wait().unwrap().success());
        let text = std::fs::read_to_string(&self.truth).unwrap();
        let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let end = lines.pop().unwrap();
        assert_eq!(end["end"], true, "{end}");
        let header = lines.remove(0);
        let of = |line: &Value| line["path"].as_str().is_some_and(|path| path.starts_with("/v1/c"));
        let replies = lines.iter().filter(|line| of(line)).cloned().collect();
        Truth { header, replies, requests: lines, end }
    }

    /// A value of /metrics, by the start of its line.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.connect().get("/metrics").text();
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Asks again and again until the metric is there.
    pub(crate) fn until(&self, name: &str, is_there: impl Fn(f64) -> bool) {
        while !is_there(self.metric(name)) {
            std::thread::yield_now();
        }
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        // Only when a test failed; else it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) struct Truth {
    pub(crate) header: Value,
    pub(crate) requests: Vec<Value>,
    /// Of the requests, those for a reply
    pub(crate) replies: Vec<Value>,
    pub(crate) end: Value,
}

pub(crate) struct Client {
    pub(crate) socket: BufReader<TcpStream>,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Client {
    pub(crate) fn new(address: &str) -> Self {
        Self { socket: BufReader::new(TcpStream::connect(address).unwrap()) }
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.socket.get_mut().write_all(bytes).unwrap();
    }

    pub(crate) fn get(&mut self, path: &str) -> Answer {
        self.send(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes());
        self.answer()
    }

    pub(crate) fn post(&mut self, path: &str, body: &Value) -> Answer {
        self.post_with(path, "", &body.to_string())
    }

    pub(crate) fn post_with(&mut self, path: &str, headers: &str, body: &str) -> Answer {
        self.send_post(path, headers, body);
        self.answer()
    }

    pub(crate) fn send_post(&mut self, path: &str, headers: &str, body: &str) {
        let length = body.len();
        self.send(
            format!("POST {path} HTTP/1.1\r\ncontent-length: {length}\r\n{headers}\r\n{body}").as_bytes(),
        );
    }

    /// One turn of a chat, streamed; the history grows by the reply.
    pub(crate) fn turn(&mut self, history: &mut Vec<Value>, user: &str, max_tokens: u32) -> Stream {
        history.push(json!({"role": "user", "content": user}));
        let body = chat(history, json!({"max_tokens": max_tokens, "ignore_eos": true}));
        let stream = self.post("/v1/chat/completions", &body).stream();
        history.push(json!({"role": "assistant", "content": stream.text}));
        stream
    }

    pub(crate) fn answer(&mut self) -> Answer {
        let head = self.head();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut body = Vec::new();
        if let Some((_, rest)) = head.split_once("content-length: ") {
            body = vec![0; rest.split("\r\n").next().unwrap().parse().unwrap()];
            self.socket.read_exact(&mut body).unwrap();
        } else {
            assert!(head.contains("transfer-encoding: chunked"), "{head}");
            loop {
                let chunk = self.chunk();
                if chunk.is_empty() {
                    break;
                }
                body.extend(chunk);
            }
        }
        Answer { status, head, body }
    }

    pub(crate) fn head(&mut self) -> String {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(self.socket.read_line(&mut head).unwrap() > 0, "closed after {head:?}");
        }
        head
    }

    pub(crate) fn chunk(&mut self) -> Vec<u8> {
        let mut size = String::new();
        assert!(self.socket.read_line(&mut size).unwrap() > 0, "closed within a body");
        let mut chunk = vec![0; usize::from_str_radix(size.trim_end(), 16).unwrap() + 2];
        self.socket.read_exact(&mut chunk).unwrap();
        assert_eq!(&chunk[chunk.len() - 2..], b"\r\n");
        chunk.truncate(chunk.len() - 2);
        chunk
    }

    /// Whether the other side has closed.
    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.socket.read(&mut [0]), Ok(0) | Err(_))
    }
}

/// What a stream carried.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) events: Vec<Value>,
    pub(crate) contents: Vec<String>,
    pub(crate) text: String,
    pub(crate) usage: Value,
    pub(crate) finish: Value,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The events of a stream that ended with `[DONE]`.
    pub(crate) fn stream(&self) -> Stream {
        assert_eq!(self.status, 200, "{}", self.text());
        let text = self.text();
        let mut data: Vec<&str> =
            text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        let events: Vec<Value> = data.iter().map(|data| serde_json::from_str(data).unwrap()).collect();
        let of = |event: &Value| {
            let choice = &event["choices"][0];
            choice["delta"]["content"]
                .as_str()
                .or(choice["text"].as_str())
                .filter(|text| !text.is_empty())
                .map(str::to_owned)
        };
        let contents: Vec<String> = events.iter().filter_map(of).collect();
        let find = |at: fn(&Value) -> &Value| {
            events.iter().map(at).find(|value| !value.is_null()).cloned().unwrap_or_default()
        };
        Stream {
            text: contents.concat(),
            contents,
            usage: find(|event| &event["usage"]),
            finish: find(|event| &event["choices"][0]["finish_reason"]),
            events,
        }
    }
}

/// A streamed chat request with usage.
pub(crate) fn chat(messages: &[Value], more: Value) -> Value {
    let mut body = json!({
        "model": "sim", "messages": messages, "stream": true, "stream_options": {"include_usage": true},
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

pub(crate) fn user(content: &str) -> Value {
    json!({"role": "user", "content": content})
}
