//! From a spec to the texts inside the messages: what is left of the plan when the server's template took its part.

use proto::spec::{Spec, TemplateCost};

use super::planned_total;

/// Tokens of the texts inside the messages: what is left of the plan when the server's template took its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageTokens {
    /// Text of the system prompt; 0: no system message is sent.
    pub system: u32,
    /// Of these, the leading ones that all sessions share.
    pub shared_system: u32,
    /// Text of the first turn's user message; at least 1.
    pub first_user: u32,
    /// Text of each later turn's user message when replies have their planned length; at least 1.
    pub later_user: u32,
}

/// Takes the template's cost off a spec, so that prompts with the template around them have the planned totals.
///
/// The system message bears what the first turn costs beyond a later one, and keeps at least one token where the
/// spec has a system prompt; what does not fit there the first user message bears.
///
/// # Errors
/// [`TemplateTooLarge`] when a user message would have no token left.
pub fn message_tokens(spec: &Spec, template: TemplateCost) -> Result<MessageTokens, TemplateTooLarge> {
    let too_large = || TemplateTooLarge {
        first_turn_tokens: template.first_turn_tokens,
        later_turn_tokens: template.later_turn_tokens,
        first_turn_plan: planned_total(spec, 1),
        user_tokens_per_turn: spec.user_tokens_per_turn,
    };
    let system_cost = template.first_turn_tokens.saturating_sub(template.later_turn_tokens);
    let system = match spec.system_prompt_tokens {
        0 => 0,
        tokens => tokens.saturating_sub(system_cost).max(1),
    };
    let first_user =
        i64::from(planned_total(spec, 1)) - i64::from(template.first_turn_tokens) - i64::from(system);
    let later_user = i64::from(spec.user_tokens_per_turn) - i64::from(template.later_turn_tokens);
    // A session of one turn has no later one that could be too small.
    let later_user = if spec.num_turns == 1 { later_user.max(1) } else { later_user };
    let at_least_one = |tokens: i64| u32::try_from(tokens).ok().filter(|&t| t >= 1).ok_or_else(too_large);
    Ok(MessageTokens {
        system,
        // All of the system message when all is shared, whatever the template took of it.
        shared_system: system.saturating_sub(spec.unique_system_prompt),
        first_user: at_least_one(first_user)?,
        later_user: at_least_one(later_user)?,
    })
}

/// The chat template leaves no room for a user message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the server's chat template takes {first_turn_tokens} tokens of the first turn and {later_turn_tokens} of each \
     later one, which leaves no token for the user message: the plan has {first_turn_plan} tokens for the first turn \
     and u = {user_tokens_per_turn} new ones for each later one; raise the ISL or lower the hit rate"
)]
pub struct TemplateTooLarge {
    /// Template tokens of the first turn.
    pub first_turn_tokens: u32,
    /// Template tokens of each later turn.
    pub later_turn_tokens: u32,
    /// Prompt tokens planned for the first turn.
    pub first_turn_plan: u32,
    /// u of the plan.
    pub user_tokens_per_turn: u32,
}
