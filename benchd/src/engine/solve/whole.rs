//! A solution in whole tokens: its turns and its averages.

use proto::spec::SpecTurn;

/// s + k·u + (k−1)·osl. A turn's prompt is under twice the ISL, so that it fits.
pub(super) fn total(system: u32, user: u32, osl: u32, turn: u32) -> u32 {
    let tokens = u64::from(system)
        + u64::from(turn) * u64::from(user)
        + u64::from(turn.saturating_sub(1)) * u64::from(osl);
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// A solution in whole tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whole {
    pub(super) user: u32,
    pub(super) system: u32,
    pub(super) shared: u32,
    pub(super) osl: u32,
    pub(super) turns: u32,
}

impl Whole {
    pub(super) fn cached(&self, turn: u32) -> u32 {
        if turn == 1 { self.shared } else { total(self.system, self.user, self.osl, turn - 1) + self.osl }
    }

    pub(super) fn spec_turn(&self, turn: u32, block_size: u32) -> SpecTurn {
        let total = total(self.system, self.user, self.osl, turn);
        let cached = self.cached(turn);
        SpecTurn {
            turn,
            total,
            cached,
            new: total - cached,
            hit_rate: f64::from(cached) / f64::from(total),
            cached_by_blocks: self.cached_by_blocks(turn, block_size),
        }
    }

    /// Tokens that lie in whole blocks of a server's cache. The last token of a reply is not among them: it is
    /// generated, but nothing is computed from it before the next turn, so that no server holds its state.
    pub(super) fn cached_by_blocks(&self, turn: u32, block_size: u32) -> u32 {
        let held = if turn == 1 { self.shared } else { self.cached(turn) - 1 };
        held - held % block_size
    }

    pub(super) fn isl(&self) -> f64 {
        let n = f64::from(self.turns);
        f64::from(self.system)
            + f64::from(self.user) * (n + 1.0) / 2.0
            + f64::from(self.osl) * (n - 1.0) / 2.0
    }

    pub(super) fn hit_rate(&self) -> f64 {
        let new = f64::from(self.system - self.shared) / f64::from(self.turns) + f64::from(self.user);
        (self.isl() - new) / self.isl()
    }

    pub(super) fn hit_rate_by_blocks(&self, block_size: u32) -> f64 {
        let cached: u64 =
            (1..=self.turns).map(|turn| u64::from(self.cached_by_blocks(turn, block_size))).sum();
        cached as f64 / (self.isl() * f64::from(self.turns))
    }
}
