//! Gaps between successive content events, packed: a record of 16 tokens keeps them in about 64 bytes, to the
//! nanosecond. Filled by the exchange, read by `metric`.

use serde::{Deserialize, Serialize};

/// A sequence of durations in nanoseconds, LEB128 each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gaps {
    bytes: Vec<u8>,
    count: u32,
}

impl Gaps {
    /// Room for about `n` gaps of a few milliseconds.
    pub fn with_capacity(n: usize) -> Self {
        Gaps { bytes: Vec::with_capacity(n * 4), count: 0 }
    }

    /// Appends one gap.
    pub fn push(&mut self, mut ns: u64) {
        self.count += 1;
        loop {
            let [low, ..] = (ns & 0x7f).to_le_bytes();
            ns >>= 7;
            if ns == 0 {
                self.bytes.push(low);
                return;
            }
            self.bytes.push(low | 0x80);
        }
    }

    /// Gaps held.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The gaps in order, in nanoseconds.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let mut rest = self.bytes.as_slice();
        std::iter::from_fn(move || {
            let end = rest.iter().position(|b| b & 0x80 == 0)?;
            let (one, tail) = rest.split_at(end + 1);
            rest = tail;
            Some(one.iter().rev().fold(0u64, |ns, b| (ns << 7) | u64::from(b & 0x7f)))
        })
    }

    /// Gives back what `with_capacity` reserved too much.
    pub fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn gaps_come_back_as_they_went_in(gaps in proptest::collection::vec(any::<u64>(), 0..200)) {
            let mut packed = Gaps::default();
            for g in &gaps {
                packed.push(*g);
            }
            prop_assert_eq!(packed.iter().collect::<Vec<_>>(), gaps.clone());
            prop_assert_eq!(packed.len(), gaps.len());
        }
    }

    #[test]
    fn a_gap_of_some_milliseconds_takes_four_bytes() {
        let mut packed = Gaps::default();
        packed.push(5_000_000);
        assert_eq!(packed.bytes.len(), 4);
    }
}
