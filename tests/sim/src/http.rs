//! HTTP/1.1 by hand: bytes in, one request out; a response in, bytes out. No I/O here.
//!
//! The responses are written by hand so that a fault can put any byte anywhere.

/// Largest request head, in bytes; more is 431.
const HEAD_MAX: usize = 64 * 1024;
/// Largest request body, in bytes; more is 413.
const BODY_MAX: usize = 64 * 1024 * 1024;
/// Most request headers; more is 431.
const HEADERS_MAX: usize = 100;

/// One request, completely read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// Without the query
    pub(crate) path: String,
    pub(crate) session: Option<String>,
    pub(crate) authorization: Option<String>,
    pub(crate) keep_alive: bool,
    pub(crate) body: Vec<u8>,
}

/// What the bytes read so far are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parsed {
    /// More must be read; `expects_continue` when the client waits for `100 Continue` before its body.
    Partial { expects_continue: bool },
    /// A request, and how many bytes it took.
    Whole { request: Request, taken: usize },
}

/// Bytes that are no request that is served: the status and why. The connection ends after it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed {
    pub(crate) status: u16,
    pub(crate) why: String,
}

fn malformed(status: u16, why: impl Into<String>) -> Malformed {
    Malformed { status, why: why.into() }
}

/// Reads one request off the front of `bytes`.
pub(crate) fn parse(bytes: &[u8]) -> Result<Parsed, Malformed> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Request::new(&mut headers);
    let head_len = match head.parse(bytes) {
        Ok(httparse::Status::Complete(len)) if len <= HEAD_MAX => len,
        Ok(httparse::Status::Partial) if bytes.len() <= HEAD_MAX => {
            return Ok(Parsed::Partial { expects_continue: false });
        }
        Ok(_) => return Err(malformed(431, format!("request head is over {HEAD_MAX} bytes"))),
        Err(httparse::Error::TooManyHeaders) => {
            return Err(malformed(431, format!("more than {HEADERS_MAX} headers")));
        }
        Err(e) => return Err(malformed(400, format!("not an HTTP request: {e}"))),
    };

    let value = |name: &str| {
        head.headers
            .iter()
            .find(|h| h.name.eq_ignore_ascii_case(name))
            .map(|h| String::from_utf8_lossy(h.value).trim().to_owned())
    };
    let rest = &bytes[head_len..];
    let body = match (value("transfer-encoding"), value("content-length")) {
        (Some(coding), _) if coding.eq_ignore_ascii_case("chunked") => dechunk(rest)?,
        (Some(coding), _) => return Err(malformed(501, format!("transfer-encoding {coding} is not served"))),
        (None, Some(len)) => {
            let len: usize =
                len.parse().map_err(|_| malformed(400, format!("content-length {len} is no length")))?;
            if len > BODY_MAX {
                return Err(malformed(413, format!("body of {len} bytes is over {BODY_MAX}")));
            }
            rest.get(..len).map(|body| (body.to_vec(), len))
        }
        (None, None) => Some((Vec::new(), 0)),
    };
    let Some((body, body_len)) = body else {
        let expects_continue = value("expect").is_some_and(|v| v.eq_ignore_ascii_case("100-continue"));
        return Ok(Parsed::Partial { expects_continue });
    };

    let connection = value("connection").unwrap_or_default().to_ascii_lowercase();
    let keep_alive = match head.version {
        Some(1) => !connection.split(',').any(|t| t.trim() == "close"),
        _ => connection.split(',').any(|t| t.trim() == "keep-alive"),
    };
    let target = head.path.unwrap_or("/");
    let request = Request {
        method: head.method.unwrap_or_default().to_owned(),
        path: target.split(['?', '#']).next().unwrap_or("/").to_owned(),
        session: value("x-session-id"),
        authorization: value("authorization"),
        keep_alive,
        body,
    };
    Ok(Parsed::Whole { request, taken: head_len + body_len })
}

/// Undoes chunked coding: the body and how many bytes it took, or nothing while it is incomplete.
fn dechunk(bytes: &[u8]) -> Result<Option<(Vec<u8>, usize)>, Malformed> {
    let mut body = Vec::new();
    let mut at = 0;
    loop {
        let (start, size) = match httparse::parse_chunk_size(&bytes[at..]) {
            Ok(httparse::Status::Complete((start, size))) => (at + start, size),
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => return Err(malformed(400, "invalid chunk size")),
        };
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if size > BODY_MAX - body.len() {
            return Err(malformed(413, format!("body is over {BODY_MAX} bytes")));
        }
        if size == 0 {
            return trailers_end(&bytes[start..]).map(|end| end.map(|len| (body, start + len)));
        }
        let Some(chunk) = bytes.get(start..start + size + 2) else { return Ok(None) };
        if &chunk[size..] != b"\r\n" {
            return Err(malformed(400, "chunk does not end where its size says"));
        }
        body.extend_from_slice(&chunk[..size]);
        at = start + size + 2;
    }
}

/// Length of the trailer section that starts `bytes`, its empty line included.
fn trailers_end(bytes: &[u8]) -> Result<Option<usize>, Malformed> {
    if bytes.starts_with(b"\r\n") {
        return Ok(Some(2));
    }
    match bytes.windows(4).position(|w| w == b"\r\n\r\n") {
        Some(at) => Ok(Some(at + 4)),
        None if bytes.len() > HEAD_MAX => Err(malformed(431, "trailers are too long")),
        None => Ok(None),
    }
}

/// A response with a body of known length.
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) content_type: &'static str,
    /// Further lines of the head, each with its end
    pub(crate) headers: &'static str,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn json(status: u16, body: &serde_json::Value) -> Self {
        Self { status, content_type: "application/json", headers: "", body: body.to_string().into_bytes() }
    }

    /// The bytes on the wire. `HEAD` gets the same head, without the body.
    pub(crate) fn render(&self, keep_alive: bool, head_only: bool) -> Vec<u8> {
        let mut out = format!(
            "HTTP/1.1 {} {}\r\nserver: benchsim\r\ncontent-type: {}\r\ncontent-length: {}\r\n{}{}\r\n",
            self.status,
            reason(self.status),
            self.content_type,
            self.body.len(),
            self.headers,
            connection(keep_alive),
        )
        .into_bytes();
        if !head_only {
            out.extend_from_slice(&self.body);
        }
        out
    }
}

/// The head of a streamed answer.
pub(crate) fn stream_head(keep_alive: bool) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\nserver: benchsim\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
         cache-control: no-cache\r\ntransfer-encoding: chunked\r\n{}\r\n",
        connection(keep_alive)
    )
    .into_bytes()
}

/// Appends `payload` as one chunk of chunked coding.
pub(crate) fn put_chunk(out: &mut Vec<u8>, payload: &[u8]) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let digits = (usize::BITS - payload.len().leading_zeros()).div_ceil(4).max(1);
    for digit in (0..digits).rev() {
        out.push(HEX[(payload.len() >> (4 * digit)) & 15]);
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(payload);
    out.extend_from_slice(b"\r\n");
}

/// The chunk that ends a chunked body.
pub(crate) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

fn connection(keep_alive: bool) -> &'static str {
    if keep_alive { "" } else { "connection: close\r\n" }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        404 => "Not Found",
        405 => "Method Not Allowed",
        413 => "Content Too Large",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        _ => "Status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &[u8] =
        b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nHost: a\r\nX-Session-Id: s1\r\nContent-Length: 5\r\n\r\nhello";
    const CHUNKED: &[u8] = b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n\
        3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: t\r\n\r\n";

    fn whole(bytes: &[u8]) -> (Request, usize) {
        match parse(bytes).unwrap() {
            Parsed::Whole { request, taken } => (request, taken),
            Parsed::Partial { .. } => panic!("partial"),
        }
    }

    #[test]
    fn every_prefix_of_a_request_is_partial_and_the_whole_is_whole() {
        for bytes in [PLAIN, CHUNKED] {
            for cut in 0..bytes.len() {
                assert!(matches!(parse(&bytes[..cut]), Ok(Parsed::Partial { .. })), "cut at {cut}");
            }
            let (request, taken) = whole(bytes);
            assert_eq!(request.body, b"hello");
            assert_eq!(taken, bytes.len());
        }
    }

    #[test]
    fn what_follows_a_request_is_left_for_the_next() {
        let two = [PLAIN, CHUNKED].concat();
        let (first, taken) = whole(&two);
        assert_eq!((first.path.as_str(), taken), ("/v1/chat/completions", PLAIN.len()));
        assert_eq!(first.session.as_deref(), Some("s1"));
        assert_eq!(whole(&two[taken..]).0.path, "/tokenize");
    }

    #[test]
    fn keep_alive_follows_version_and_header() {
        let kept = |head: &str| whole(format!("GET / {head}\r\n\r\n").as_bytes()).0.keep_alive;
        assert!(kept("HTTP/1.1"));
        assert!(!kept("HTTP/1.1\r\nConnection: Close"));
        assert!(!kept("HTTP/1.0"));
        assert!(kept("HTTP/1.0\r\nConnection: keep-alive"));
    }

    #[test]
    fn a_client_that_waits_for_100_continue_is_told_apart() {
        let head = b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n";
        assert_eq!(parse(head), Ok(Parsed::Partial { expects_continue: true }));
    }

    #[test]
    fn bad_requests_name_their_status() {
        let status = |bytes: &[u8]| parse(bytes).unwrap_err().status;
        assert_eq!(status(b"\x16\x03\x01 TLS hello\r\n\r\n"), 400);
        assert_eq!(status(b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"), 400);
        assert_eq!(status(b"POST / HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n"), 413);
        assert_eq!(status(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n"), 400);
        assert_eq!(status(b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n"), 501);
        assert_eq!(status(&[b'A'; HEAD_MAX + 1]), 431);
    }

    #[test]
    fn chunks_carry_their_size_in_hex() {
        for (len, size) in [(0, "0"), (1, "1"), (15, "f"), (16, "10"), (255, "ff"), (4096, "1000")] {
            let mut out = Vec::new();
            put_chunk(&mut out, &vec![b'x'; len]);
            assert!(out.starts_with(format!("{size}\r\n").as_bytes()), "{len}");
            assert_eq!(out.len(), size.len() + 4 + len);
        }
    }
}
