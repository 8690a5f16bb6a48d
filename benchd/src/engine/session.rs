//! A conversation from its first message to its last: writes the next request's body, and turns an answer into a
//! record and, when the session goes on, the next turn. Pure but for the tokenizer; the prompt threads run it.

use std::sync::Arc;

use bytes::Bytes;
use proto::record::{Outcome, Record, TokenSource, session_id};
use proto::spec::{Spec, TemplateCost};
use reqwest::header::HeaderValue;

use crate::engine::exchange::{Observed, Outgoing};
use crate::engine::solve::{MessageTokens, planned_total};
use crate::engine::tokenizer::Tokenizer;
use crate::engine::words::Words;

/// Content events of one answer that room is reserved for.
const MAX_RESERVED_EVENTS: u32 = 4096;

/// What all sessions of a run have in common.
#[derive(Debug)]
pub struct Conversation {
    /// The solved workload.
    pub spec: Spec,
    /// Tokens of the messages' texts.
    pub tokens: MessageTokens,
    /// The chat template's cost; zero when nobody counts it.
    pub template: TemplateCost,
    /// Words that are one token each.
    pub words: Words,
    /// Counts replies; absent when only the server could, and it is not asked under load.
    pub tokenizer: Option<Tokenizer>,
    /// Beginning of every body, up to and with `"messages":[`.
    pub body_head: String,
    /// Seed of the texts.
    pub seed: u64,
    /// Prefix of `X-Session-Id`.
    pub session_prefix: String,
    /// Content event at which the first-chunk instant is taken.
    pub first_chunk_threshold: u32,
}

/// A session between two of its turns.
#[derive(Debug)]
pub struct Session {
    /// From 0, in the order of starts; fixes every text.
    pub number: u64,
    /// Its last turn; below the workload's for a cut first generation.
    pub last_turn: u32,
    /// The turn that was made last, from 1.
    pub turn: u32,
    id: HeaderValue,
    /// Body head and messages so far, without what closes them: history grows, it is never written again.
    body: String,
    /// Tokens of all texts so far, by the tokenizer.
    content_tokens: u32,
}

/// A turn that is ready to be sent.
#[derive(Debug)]
pub struct Turn {
    /// Its session.
    pub session: Box<Session>,
    /// The request.
    pub outgoing: Outgoing,
    /// Prompt tokens of the plan.
    pub planned_tokens: u32,
    /// Prompt tokens that we expect the server to count.
    pub expected_tokens: u32,
    /// Prompt tokens that an ideal cache holds.
    pub expected_cached: u32,
}

/// What became of a session after a turn.
#[derive(Debug)]
pub enum Next {
    /// It goes on.
    Continues(Box<Turn>),
    /// That was its last turn.
    Completed,
    /// The turn failed or was ended by us.
    Broken,
}

/// When a turn was due, and how long it waited for a place.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch {
    /// Due, in ns of the run's clock.
    pub due_ns: i64,
    /// Wait under `max_concurrency`.
    pub cap_wait_ns: u64,
}

impl Turn {
    /// The first turn of session `number`, which will have `last_turn` turns.
    pub fn first(conversation: &Conversation, number: u64, last_turn: u32) -> Box<Turn> {
        let tokens = &conversation.tokens;
        let id = session_id(&conversation.session_prefix, number);
        let mut session = Box::new(Session {
            number,
            last_turn,
            turn: 1,
            // A hexadecimal prefix and a number are visible ASCII.
            id: HeaderValue::try_from(id).unwrap_or_else(|_| HeaderValue::from_static("session")),
            body: conversation.body_head.clone(),
            content_tokens: 0,
        });
        // Tokens as they could be made: a tokenizer without enough words of one token misses some lengths.
        if tokens.system > 0 {
            session.body.push_str(r#"{"role":"system","content":""#);
            let unique = tokens.system - tokens.shared_system;
            session.content_tokens += conversation.words.push_system(
                &mut session.body,
                conversation.seed,
                tokens.shared_system,
                number,
                unique,
            );
            session.body.push_str("\"},");
        }
        session.content_tokens += session.push_user(conversation, tokens.first_user);
        let planned = planned_total(&conversation.spec, 1);
        let expected = session.content_tokens + conversation.template.first_turn_tokens;
        // The first session of a run finds nothing of the shared part.
        let cached = if number == 0 { 0 } else { conversation.spec.shared_system_prompt };
        session.into_turn(conversation, planned, expected, cached)
    }

    /// Turns an answer into its record, and the session into its next turn.
    pub fn answered(
        self,
        conversation: &Conversation,
        dispatch: Dispatch,
        mut seen: Observed,
    ) -> (Record, Next) {
        let mut session = self.session;
        let usage = seen.usage.unwrap_or_default();
        // A prompt has tokens; a 0 is a server that does not count.
        let prompt_tokens = usage.prompt_tokens.filter(|tokens| *tokens > 0);
        let reply_tokens = reply_tokens(conversation, &seen);
        let (output_tokens, output_source) = output_tokens(conversation, &seen);
        let counted = match (prompt_tokens, &conversation.tokenizer) {
            (Some(tokens), _) => Some((tokens, TokenSource::Usage)),
            (None, Some(_)) => Some((self.expected_tokens, TokenSource::Tokenizer)),
            (None, None) => None,
        };
        let record = Record {
            session: Some(session.number),
            turn: Some(session.turn),
            due_ns: dispatch.due_ns,
            cap_wait_ns: dispatch.cap_wait_ns,
            sent_ns: Some(seen.sent_ns),
            first_token_ns: seen.first_token_ns,
            first_answer_ns: seen.first_answer_ns,
            first_chunk_ns: seen.first_chunk_ns,
            last_token_ns: seen.last_token_ns,
            completed_ns: seen.completed_ns,
            events: seen.events,
            reads: seen.reads,
            is_whole: seen.is_whole,
            gaps: std::mem::take(&mut seen.gaps),
            event_tokens: event_tokens(conversation, &seen, output_tokens),
            outcome: seen.outcome,
            error: seen.error.take(),
            finish_reason: seen.finish_reason.take(),
            planned_input_tokens: Some(self.planned_tokens),
            input_tokens: counted.map(|(tokens, _)| tokens),
            input_tokens_source: counted.map(|(_, source)| source),
            output_tokens,
            output_tokens_source: output_source,
            reasoning_tokens: usage.reasoning_tokens,
            cached_tokens: usage.cached_tokens,
            expected_cached_tokens: Some(
                self.expected_cached.min(counted.map_or(u32::MAX, |(tokens, _)| tokens)),
            ),
            reply_tokens,
            new_connection: seen.new_connection,
            resent: seen.resent,
        };
        if seen.outcome != Outcome::Ok {
            return (record, Next::Broken);
        }
        if session.turn >= session.last_turn {
            return (record, Next::Completed);
        }
        let reply = reply_tokens.unwrap_or(0);
        let prompt = prompt_tokens.unwrap_or(self.expected_tokens);
        session.turn += 1;
        session.push_reply(&seen.text.answer);
        session.content_tokens = session.content_tokens.saturating_add(reply);
        // Totals stay on plan: the next message takes up what the reply, or the server's count, was off by.
        let planned = planned_total(&conversation.spec, session.turn);
        // The counts are the server's word, which may be anything.
        let cached = prompt.saturating_add(reply);
        let history = cached.saturating_add(conversation.template.later_turn_tokens);
        let user = planned.saturating_sub(history).max(1);
        let user = session.push_user(conversation, user);
        session.content_tokens = session.content_tokens.saturating_add(user);
        let turn = session.into_turn(conversation, planned, history.saturating_add(user), cached);
        (record, Next::Continues(turn))
    }
}

impl Session {
    /// Appends the next user message; gives its tokens.
    fn push_user(&mut self, conversation: &Conversation, tokens: u32) -> u32 {
        self.body.push_str(r#"{"role":"user","content":""#);
        let (seed, number) = (conversation.seed, self.number);
        let made = conversation.words.push_user(&mut self.body, seed, number, self.turn, tokens);
        self.body.push_str("\"}");
        made
    }

    fn push_reply(&mut self, answer: &str) {
        self.body.push_str(r#",{"role":"assistant","content":"#);
        // A string always has a JSON form.
        self.body.push_str(&serde_json::to_string(answer).unwrap_or_else(|_| "\"\"".to_owned()));
        self.body.push_str("},");
    }

    fn into_turn(
        self: Box<Self>,
        conversation: &Conversation,
        planned: u32,
        expected: u32,
        cached: u32,
    ) -> Box<Turn> {
        let mut body = Vec::with_capacity(self.body.len() + 2);
        body.extend_from_slice(self.body.as_bytes());
        body.extend_from_slice(b"]}");
        let outgoing = Outgoing {
            body: Bytes::from(body),
            session_id: self.id.clone(),
            first_chunk_threshold: conversation.first_chunk_threshold,
            expected_events: conversation.spec.osl.min(MAX_RESERVED_EVENTS),
        };
        Box::new(Turn {
            session: self,
            outgoing,
            planned_tokens: planned,
            expected_tokens: expected,
            expected_cached: cached,
        })
    }
}

/// Tokens of the reply as history.
fn reply_tokens(conversation: &Conversation, seen: &Observed) -> Option<u32> {
    match &conversation.tokenizer {
        Some(tokenizer) => u32::try_from(tokenizer.count(&seen.text.answer)).ok(),
        None if seen.text.other.is_empty() => {
            Some(seen.usage.and_then(|u| u.completion_tokens).unwrap_or(seen.events))
        }
        // How much of it was answer is not known.
        None => None,
    }
}

fn output_tokens(conversation: &Conversation, seen: &Observed) -> (Option<u32>, Option<TokenSource>) {
    // No tokens in some events is a server that does not count.
    let counted = |tokens: &u32| *tokens > 0 || seen.events == 0;
    if let Some(tokens) = seen.usage.and_then(|u| u.completion_tokens).filter(counted) {
        return (Some(tokens), Some(TokenSource::Usage));
    }
    if seen.events == 0 {
        return (None, None);
    }
    if let Some(tokenizer) = &conversation.tokenizer {
        let tokens = tokenizer.count(&seen.text.answer) + tokenizer.count(&seen.text.other);
        return (u32::try_from(tokens).ok(), Some(TokenSource::Tokenizer));
    }
    (Some(seen.events), Some(TokenSource::Events))
}

/// Tokens of each content event; absent when they are one each.
///
/// By the steps of a running usage; else by the tokenizer on each event's text, scaled to the total; else equal
/// shares of it.
fn event_tokens(
    conversation: &Conversation,
    seen: &Observed,
    output_tokens: Option<u32>,
) -> Option<Box<[f32]>> {
    let total = output_tokens?;
    let events = seen.events as usize;
    if events == 0 || total == seen.events {
        return None;
    }
    // Token counts of one reply are far below 2^24, so they are exact in an f32.
    #[allow(clippy::cast_precision_loss)]
    let exact = |tokens: u32| tokens as f32;
    if seen.usage_steps.len() == events && seen.usage_steps.is_sorted() {
        let before = std::iter::once(0).chain(seen.usage_steps.iter().copied());
        return Some(
            seen.usage_steps.iter().zip(before).map(|(upto, before)| exact(upto - before)).collect(),
        );
    }
    if let Some(tokenizer) = &conversation.tokenizer {
        let count = |text: &str| if text.is_empty() { 0 } else { tokenizer.count(text) };
        let counts: Vec<u32> = seen
            .text
            .events()
            .map(|(answer, other)| u32::try_from(count(answer) + count(other)).unwrap_or(u32::MAX))
            .collect();
        let sum: u32 = counts.iter().sum();
        if sum > 0 {
            let scale = exact(total) / exact(sum);
            return Some(counts.into_iter().map(|n| exact(n) * scale).collect());
        }
    }
    Some(vec![exact(total) / exact(seen.events); events].into_boxed_slice())
}

/// A conversation that threads share.
pub type SharedConversation = Arc<Conversation>;

#[cfg(test)]
mod tests {
    use proto::plan::Workload;

    use super::*;
    use crate::engine::chunk::Usage;
    use crate::engine::solve::{message_tokens, solve};

    fn conversation() -> Conversation {
        let spec = solve(&Workload::default()).unwrap();
        let template = TemplateCost { first_turn_tokens: 7, later_turn_tokens: 5 };
        let tokenizer = Tokenizer::builtin();
        Conversation {
            tokens: message_tokens(&spec, template).unwrap(),
            template,
            words: Words::find(&tokenizer).unwrap(),
            tokenizer: Some(tokenizer),
            body_head: "{\"messages\":[".into(),
            seed: 1,
            session_prefix: "s".into(),
            first_chunk_threshold: 16,
            spec,
        }
    }

    fn answer(prompt_tokens: u32, completion_tokens: u32) -> Observed {
        let mut seen = Observed::new(0, 2);
        seen.text.answer = "the way".into();
        seen.text.ends = vec![(3, 0), (7, 0)];
        seen.events = 2;
        seen.outcome = Outcome::Ok;
        let (prompt_tokens, completion_tokens) = (Some(prompt_tokens), Some(completion_tokens));
        seen.usage = Some(Usage { prompt_tokens, completion_tokens, ..Usage::default() });
        seen
    }

    fn record_of(seen: Observed) -> Record {
        let conversation = conversation();
        let turn = *Turn::first(&conversation, 0, 1);
        turn.answered(&conversation, Dispatch { due_ns: 0, cap_wait_ns: 0 }, seen).0
    }

    #[test]
    fn a_server_that_counts_nothing_is_not_believed() {
        let counted = record_of(answer(1000, 2));
        assert_eq!(
            (counted.input_tokens, counted.input_tokens_source),
            (Some(1000), Some(TokenSource::Usage))
        );
        assert_eq!(
            (counted.output_tokens, counted.output_tokens_source),
            (Some(2), Some(TokenSource::Usage))
        );
        let zeros = record_of(answer(0, 0));
        assert_eq!(
            (zeros.input_tokens, zeros.input_tokens_source),
            (Some(1000), Some(TokenSource::Tokenizer))
        );
        assert_eq!(zeros.output_tokens_source, Some(TokenSource::Tokenizer));
        assert!(zeros.output_tokens.is_some_and(|tokens| tokens > 0));
    }
}
