//! Bytes of an event stream → the data of each event, by the WHATWG rules, whatever the reads cut. Owns the
//! unfinished line and the unfinished event; fed by the exchange, which stamped the read before.

/// Longest event, in bytes of data; beyond it the stream counts as undecodable instead of filling the memory.
pub const MAX_EVENT_BYTES: usize = 64 << 20;

/// An event, or a line of one, was longer than [`MAX_EVENT_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {MAX_EVENT_BYTES} bytes")]
pub struct EventTooLong;

/// An incremental decoder of one stream.
#[derive(Debug, Default)]
pub struct SseDecoder {
    /// Beginning of a line whose end was not read yet.
    line: Vec<u8>,
    /// Data of the event whose blank line was not read yet, each line followed by a newline.
    data: Vec<u8>,
    has_data: bool,
    /// The last byte was a CR: an LF that follows belongs to it.
    after_cr: bool,
    /// Bytes of a byte order mark seen so far, while nothing else was.
    bom: Option<usize>,
}

const BOM: &[u8] = b"\xef\xbb\xbf";

impl SseDecoder {
    /// At the beginning of a stream.
    pub fn new() -> Self {
        SseDecoder { bom: Some(0), ..SseDecoder::default() }
    }

    /// Takes the bytes of one read and calls `on_event` with the data of each event that they complete.
    pub fn feed(&mut self, bytes: &[u8], mut on_event: impl FnMut(&[u8])) -> Result<(), EventTooLong> {
        let mut rest = self.without_bom(bytes);
        while !rest.is_empty() {
            if std::mem::take(&mut self.after_cr) && rest[0] == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let Some(end) = memchr::memchr2(b'\n', b'\r', rest) else {
                if self.line.len() + rest.len() > MAX_EVENT_BYTES {
                    return Err(EventTooLong);
                }
                self.line.extend_from_slice(rest);
                return Ok(());
            };
            let (head, tail) = rest.split_at(end);
            self.after_cr = tail[0] == b'\r';
            rest = &tail[1..];
            if self.line.is_empty() {
                self.end_line(head, &mut on_event)?;
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(head);
                let done = self.end_line(&line, &mut on_event);
                line.clear();
                self.line = line;
                done?;
            }
        }
        Ok(())
    }

    /// Skips a byte order mark at the very beginning; a cut one that turns out to be none is put back.
    fn without_bom<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let Some(mut seen) = self.bom else { return bytes };
        let mut rest = bytes;
        while let [first, tail @ ..] = rest {
            if *first != BOM[seen] {
                self.line.extend_from_slice(&BOM[..seen]);
                self.bom = None;
                return rest;
            }
            rest = tail;
            seen += 1;
            if seen == BOM.len() {
                self.bom = None;
                return rest;
            }
        }
        self.bom = Some(seen);
        rest
    }

    fn end_line(&mut self, line: &[u8], on_event: &mut impl FnMut(&[u8])) -> Result<(), EventTooLong> {
        if line.is_empty() {
            if std::mem::take(&mut self.has_data) {
                on_event(&self.data[..self.data.len() - 1]);
            }
            self.data.clear();
            return Ok(());
        }
        // Comments, `event`, `id` and `retry` carry nothing that an answer needs.
        let Some(value) = line.strip_prefix(b"data") else { return Ok(()) };
        let value = match value {
            [] => value,
            [b':', b' ', value @ ..] | [b':', value @ ..] => value,
            _ => return Ok(()), // a field whose name only begins with "data"
        };
        if self.data.len() + value.len() > MAX_EVENT_BYTES {
            return Err(EventTooLong);
        }
        self.data.extend_from_slice(value);
        self.data.push(b'\n');
        self.has_data = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(chunks: &[&[u8]]) -> Vec<String> {
        let mut decoder = SseDecoder::new();
        let mut events = Vec::new();
        for chunk in chunks {
            decoder.feed(chunk, |data| events.push(String::from_utf8(data.to_vec()).unwrap())).unwrap();
        }
        events
    }

    #[test]
    fn every_line_ending_and_field_form_is_read() {
        let stream = b"\xef\xbb\xbfdata: a\n\n: comment\ndata:b\r\n\r\nevent: x\rdata: c\rid: 1\rdata:  d\r\rretry: 5\ndata\n\n";
        assert_eq!(decode(&[stream]), ["a", "b", "c\n d", ""]);
    }

    #[test]
    fn a_field_that_only_begins_with_data_is_ignored() {
        assert_eq!(decode(&[b"database: x\n\ndata: y\n\n"]), ["y"]);
    }

    #[test]
    fn an_event_without_its_blank_line_is_not_an_event() {
        assert!(decode(&[b"data: x\n"]).is_empty());
    }

    #[test]
    fn what_only_begins_like_a_byte_order_mark_is_kept() {
        // The line then is not a data line, but the next one is.
        assert_eq!(decode(&[b"\xef", b"\xbbdata: x\n\n", b"data: y\n\n"]), ["y"]);
    }

    #[test]
    fn a_line_without_end_is_refused_in_time() {
        let mut decoder = SseDecoder::new();
        let block = vec![b'x'; 1 << 20];
        let refused = (0..70).any(|_| decoder.feed(&block, |_| ()).is_err());
        assert!(refused);
    }

    /// A line of a stream, and what it adds to the data of its event.
    fn line() -> impl Strategy<Value = (String, Option<String>)> {
        // Text of one line, with characters of one to four bytes.
        let text = "[a-z{}\": é€😀]{0,12}";
        prop_oneof![
            4 => text.prop_map(|text| (format!("data: {text}"), Some(text))),
            // The space after the colon belongs to the form, not to the data.
            2 => "[a-z{}é€😀][a-z é€😀]{0,8}".prop_map(|text| (format!("data:{text}"), Some(text))),
            1 => Just(("data".to_owned(), Some(String::new()))),
            1 => text.prop_map(|text| (format!(":{text}"), None)),
            1 => text.prop_map(|text| (format!("event: {text}"), None)),
            1 => Just(("id: 7".to_owned(), None)),
            1 => Just(("retry: 1000".to_owned(), None)),
            1 => Just(("database: x".to_owned(), None)),
            1 => Just((" data: x".to_owned(), None)),
        ]
    }

    /// A stream, and its events.
    fn stream() -> impl Strategy<Value = (Vec<u8>, Vec<String>)> {
        let event = proptest::collection::vec(line(), 0..5);
        let ends = proptest::collection::vec(prop_oneof![Just("\n"), Just("\r\n"), Just("\r")], 1..8);
        (proptest::collection::vec(event, 0..8), ends, any::<bool>(), any::<bool>()).prop_map(
            |(events, ends, has_mark, is_cut)| {
                let mut text = if has_mark { "\u{feff}".to_owned() } else { String::new() };
                let mut expected = Vec::new();
                // A CR and the LF of the next, empty line would be one line end.
                let mut ends = ends.iter().cycle();
                let mut put = |line: &str| {
                    text.push_str(line);
                    let end = *ends.next().unwrap();
                    text.push_str(if line.is_empty() && text.ends_with('\r') && end == "\n" {
                        "\r"
                    } else {
                        end
                    });
                };
                for lines in &events {
                    lines.iter().for_each(|(line, _)| put(line));
                    put("");
                    let data: Vec<&str> = lines.iter().filter_map(|(_, data)| data.as_deref()).collect();
                    if !data.is_empty() {
                        expected.push(data.join("\n"));
                    }
                }
                // An event whose blank line never came is none.
                if is_cut {
                    put("data: cut");
                }
                (text.into_bytes(), expected)
            },
        )
    }

    fn cut<'a>(stream: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
        let mut at: Vec<usize> = cuts.iter().map(|c| c.index(stream.len() + 1)).collect();
        at.push(0);
        at.push(stream.len());
        at.sort_unstable();
        at.windows(2).map(|w| &stream[w[0]..w[1]]).collect()
    }

    proptest! {
        #[test]
        fn a_stream_gives_the_events_that_it_was_made_of_however_it_is_cut(
            (stream, events) in stream(),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            prop_assert_eq!(&decode(&[&stream]), &events);
            prop_assert_eq!(&decode(&cut(&stream, &cuts)), &events);
            prop_assert_eq!(&decode(&stream.chunks(1).collect::<Vec<_>>()), &events);
        }

        #[test]
        fn any_bytes_give_the_same_events_however_they_are_cut(
            stream in proptest::collection::vec(
                prop_oneof![
                    4 => prop::sample::select(b"\r\n\n:dat \xef\xbb\xbf".to_vec()), 1 => any::<u8>(),
                ],
                0..200,
            ),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let events = |pieces: &[&[u8]]| {
                let mut decoder = SseDecoder::new();
                let mut events: Vec<Vec<u8>> = Vec::new();
                pieces.iter().for_each(|piece| decoder.feed(piece, |data| events.push(data.to_vec())).unwrap());
                events
            };
            let whole = events(&[&stream]);
            prop_assert_eq!(&events(&cut(&stream, &cuts)), &whole);
            prop_assert_eq!(&events(&stream.chunks(1).collect::<Vec<_>>()), &whole);
        }

        #[test]
        fn any_chunking_gives_the_same_events(
            pieces in proptest::collection::vec(
                prop_oneof![
                    Just("data: {\"a\":1}"), Just("data:x"), Just("data"), Just(": c"), Just("event: e"), Just("\n"),
                    Just("\r"), Just("\r\n"), Just("\n\n"), Just("\r\n\r\n"), Just("é€"), Just("\u{feff}"), Just("data: é"),
                ],
                0..40,
            ),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let stream = pieces.concat().into_bytes();
            let whole = decode(&[&stream]);
            prop_assert_eq!(decode(&cut(&stream, &cuts)), whole.clone());
            let bytes: Vec<&[u8]> = stream.chunks(1).collect();
            prop_assert_eq!(decode(&bytes), whole);
        }
    }
}
