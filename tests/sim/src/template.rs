//! The chat template: which token ids stand around the messages' contents.
//!
//! Prompt = A preamble ids, then for each message B header ids of its role and its content, then C ids of the
//! reply's header. The ids lie above the vocabulary, so that no content can look like them. The reply's header
//! and an assistant message's header are the same ids (as many as both have): with B = C, a history
//! with its replies continues the ids of the request before it, as with real templates.

use crate::options::TemplateOptions;

/// Ids kept for each header; the options are bounded below it.
const SPAN: u32 = 1 << 16;

/// Token ids of a chat prompt. `messages` are role and content ids.
pub(crate) fn prompt_ids(
    template: TemplateOptions,
    vocabulary: u32,
    messages: &[(&str, &[u32])],
) -> Vec<u32> {
    let content: usize = messages.iter().map(|(_, ids)| ids.len()).sum();
    let header = template.message as usize * messages.len();
    let mut ids = Vec::with_capacity(content + header + (template.request + template.reply) as usize);
    ids.extend(header_ids(vocabulary, 0, template.request));
    for (role, content) in messages {
        ids.extend(header_ids(vocabulary, role_number(role), template.message));
        ids.extend_from_slice(content);
    }
    ids.extend(header_ids(vocabulary, role_number("assistant"), template.reply));
    ids
}

fn header_ids(vocabulary: u32, number: u32, count: u32) -> std::ops::Range<u32> {
    let start = vocabulary + number * SPAN;
    start..start + count
}

fn role_number(role: &str) -> u32 {
    match role {
        "system" | "developer" => 1,
        "user" => 2,
        "assistant" => 3,
        "tool" => 4,
        _ => 5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: (&str, &[u32]) = ("user", &[1, 2]);

    #[test]
    fn the_count_is_a_plus_b_for_each_message_plus_c_plus_content() {
        let template = TemplateOptions { request: 7, message: 5, reply: 4 };
        let ids = prompt_ids(template, 1000, &[("system", &[9]), USER, ("assistant", &[3]), USER]);
        assert_eq!(ids.len(), 7 + 5 * 4 + 4 + 6);
        assert_eq!(prompt_ids(TemplateOptions { request: 0, message: 0, reply: 0 }, 1000, &[USER]), [1, 2]);
    }

    #[test]
    fn headers_lie_above_the_vocabulary_and_differ_by_role() {
        let template = TemplateOptions { request: 2, message: 2, reply: 2 };
        let ids = prompt_ids(template, 1000, &[("system", &[]), ("user", &[])]);
        assert!(ids.iter().all(|id| *id >= 1000));
        let distinct: std::collections::HashSet<_> = ids.iter().collect();
        assert_eq!(distinct.len(), ids.len());
    }

    #[test]
    fn the_next_turn_continues_the_ids_of_prompt_and_reply_when_b_is_c() {
        let template = TemplateOptions { request: 7, message: 5, reply: 5 };
        let mut first = prompt_ids(template, 1000, &[USER]);
        first.extend([3, 4]);
        let second = prompt_ids(template, 1000, &[USER, ("assistant", &[3, 4]), USER]);
        assert!(second.starts_with(&first));
        let uneven = TemplateOptions { reply: 3, ..template };
        let first = [prompt_ids(uneven, 1000, &[USER]), vec![3, 4]].concat();
        assert!(!prompt_ids(uneven, 1000, &[USER, ("assistant", &[3, 4]), USER]).starts_with(&first));
    }
}
