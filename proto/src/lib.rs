//! benchd's protocol: the messages between `benchd` and its clients, and the values that they carry.
//!
//! # Transport
//!
//! A UNIX stream socket. One JSON object a line each way, UTF-8, ended by `\n`; a line to the daemon is at most
//! [`wire::MAX_REQUEST_BYTES`] long. Each request gets one reply, in order; there are no ids. A connection may
//! carry any number of requests.
//!
//! # Requests and replies
//!
//! A request is tagged by `cmd` ([`wire::Request`]); unknown commands and unknown fields are refused. A reply
//! ([`wire::Reply`]) is `{"ok":VALUE}` or `{"err":{"code":CODE,"message":TEXT}}`, with a code of
//! [`wire::ErrorCode`]. Readers of replies, events and saved files ignore fields that they do not know.
//!
//! | request | answer |
//! |---|---|
//! | `{"cmd":"hello"}` | [`wire::Hello`] |
//! | `{"cmd":"status"}` | [`wire::Status`] |
//! | `{"cmd":"plan","workload":{…}}` | [`spec::Spec`] |
//! | `{"cmd":"run","plan":{…}}` | [`report::Report`] at the end of the run, then one [`record::Row`] a line, then [`wire::EndLine`] |
//! | `{"cmd":"smoke","target":{…}}` | [`report::SmokeReport`] |
//! | `{"cmd":"watch"}` | no reply: the connection becomes a stream of [`wire::Event`]s, the state first |
//! | `{"cmd":"stop"}` | [`wire::Stopping`]; the connection that asked for the run gets the partial report |
//! | `{"cmd":"quit"}` | [`wire::Stopping`]; the daemon ends as by SIGTERM |
//!
//! A watching connection gets at most one `progress` a second. A reader that falls behind gets one `dropped` event
//! and is disconnected; nothing else waits for it.
//!
//! # Names
//!
//! Names end in their unit (`_ms`, `_s`, `_per_s`, `_tok_s`). Instants are relative to the run's origin on the
//! monotonic clock; wall-clock time appears where a name says `epoch`. Absent values are `null`, never 0.

pub mod gaps;
pub mod interval;
pub mod metric;
pub mod plan;
pub mod record;
pub mod report;
pub mod socket;
pub mod spec;
mod stats;
pub mod wire;
