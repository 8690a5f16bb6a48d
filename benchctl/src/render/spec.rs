//! The solved workload: inputs, what they come to, what else would have been possible, and every turn.

use std::io::{self, Write};

use proto::spec::Spec;

use super::table::{Table, count, decimal, percent, shown};

/// Writes a spec.
pub fn spec(spec: &Spec, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "Workload")?;
    let mut table = Table::new(1, &["", "asked", "comes to"]);
    let row = |table: &mut Table, name: &str, asked: String, comes_to: String| {
        table.row([name.to_owned(), asked, comes_to]);
    };
    let tokens = |n: u32| count(u64::from(n));
    row(&mut table, "input tokens, mean (ISL)", tokens(spec.isl), decimal(Some(spec.effective_isl), 1));
    row(&mut table, "output tokens (OSL)", tokens(spec.osl), tokens(spec.osl));
    let asked = if spec.hit_rate_given { percent(Some(spec.hit_rate)) } else { "natural".to_owned() };
    row(&mut table, "hit rate", asked, percent(Some(spec.effective_hit_rate)));
    let by_blocks = percent(Some(spec.effective_hit_rate_by_blocks));
    row(&mut table, &format!("hit rate by blocks of {}", spec.block_size), String::new(), by_blocks);
    row(&mut table, "turns", tokens(spec.num_turns), tokens(spec.num_turns));
    let ratio = decimal(Some(spec.shared_system_prompt_ratio), 2);
    let asked = if spec.shared_system_prompt_ratio_given { ratio.clone() } else { "default".to_owned() };
    row(&mut table, "shared system prompt ratio", asked, ratio);
    let think = format!("{} s", spec.think_time_s);
    row(&mut table, "think time", think.clone(), think);
    table.write(out)?;
    writeln!(
        out,
        "  u = {} new user tokens a turn, s = {} system prompt tokens ({} shared, {} unique)",
        tokens(spec.user_tokens_per_turn),
        tokens(spec.system_prompt_tokens),
        tokens(spec.shared_system_prompt),
        tokens(spec.unique_system_prompt)
    )?;
    let range = |range: &proto::spec::Range| {
        // Rounded inwards, so that what is printed is feasible.
        let min = (range.min * 1e4 - 1e-6).ceil() / 1e4;
        let max = (range.max * 1e4 + 1e-6).floor() / 1e4;
        // `+ 0.0` turns -0 into 0.
        format!("{} to {}", min + 0.0, max)
    };
    writeln!(
        out,
        "  feasible with the rest as it is: hit rate {}, shared ratio {}",
        range(&spec.feasible_hit_rate),
        range(&spec.feasible_shared_system_prompt_ratio)
    )?;
    for notice in &spec.notices {
        writeln!(out, "  note: {notice}")?;
    }
    writeln!(out)?;
    per_turn(spec, out)
}

fn per_turn(spec: &Spec, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "Prompt of each turn (tokens)")?;
    let mut table = Table::new(0, &["turn", "total", "cached", "new", "hit rate", "cached by blocks"]);
    for index in shown(spec.per_turn.len()) {
        let Some(turn) = index.and_then(|index| spec.per_turn.get(index)) else {
            table.row(["…".to_owned()]);
            continue;
        };
        let tokens = |n: u32| count(u64::from(n));
        table.row([
            turn.turn.to_string(),
            tokens(turn.total),
            tokens(turn.cached),
            tokens(turn.new),
            percent(Some(turn.hit_rate)),
            tokens(turn.cached_by_blocks),
        ]);
    }
    table.write(out)
}
