//! The prefix cache: which leading blocks of a prompt some earlier request has already computed.
//!
//! Blocks are known by chained hashes of the real token ids, as in vLLM: a block's hash covers all that
//! precedes it. A request enters all its blocks when it starts, each with the instant from which it can be
//! used (its prompt's at the first token, its reply's as generated), so that availability follows the
//! plan and no write is delayed by cache work. A request that ends early takes back what it did not reach.
//!
//! Simpler than vLLM in two ways: blocks of running requests can be pushed out too, and when a request is
//! cut off, those that computed the same blocks at the same time, only later, do not put them back.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

/// Name of a block: its own ids and all before them.
pub(crate) type BlockHash = u128;

const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Entry {
    hash: BlockHash,
    ready_ns: u64,
    newer: u32,
    older: u32,
}

/// A bounded set of blocks, least recently used out first. The mutex around it is the caller's.
#[derive(Debug)]
pub(crate) struct Cache {
    capacity: usize,
    index: HashMap<BlockHash, u32>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
}

/// Hashes of the whole blocks of `ids`, first to last.
pub(crate) fn block_hashes(ids: &[u32], block_size: usize) -> Vec<BlockHash> {
    let mut parent: BlockHash = 0;
    let mut bytes = Vec::with_capacity(16 + 4 * block_size);
    ids.chunks_exact(block_size)
        .map(|block| {
            bytes.clear();
            bytes.extend_from_slice(&parent.to_le_bytes());
            block.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
            let digest: [u8; 32] = Sha256::digest(&bytes).into();
            let (front, _) = digest.split_at(16);
            parent = front.iter().fold(0, |hash, byte| (hash << 8) | u128::from(*byte));
            parent
        })
        .collect()
}

impl Cache {
    /// A cache of at most `capacity` blocks; 0 caches nothing.
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            index: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            newest: NONE,
            oldest: NONE,
        }
    }

    /// How many of the leading `blocks` can be used at `now_ns`.
    pub(crate) fn hits(&self, blocks: &[BlockHash], now_ns: u64) -> usize {
        blocks
            .iter()
            .take_while(|hash| {
                self.index.get(hash).is_some_and(|at| self.entries[*at as usize].ready_ns <= now_ns)
            })
            .count()
    }

    /// Enters `blocks` (hash, instant from which it can be used), first to last, and makes them the newest.
    ///
    /// Backwards, so that a chain loses its end first: a block without its parents is of no use.
    pub(crate) fn enter(&mut self, blocks: &[(BlockHash, u64)]) {
        if self.capacity == 0 {
            return;
        }
        for &(hash, ready_ns) in blocks.iter().rev() {
            if let Some(&at) = self.index.get(&hash) {
                let entry = &mut self.entries[at as usize];
                entry.ready_ns = entry.ready_ns.min(ready_ns);
                self.unlink(at);
                self.link_newest(at);
                continue;
            }
            if self.index.len() == self.capacity {
                self.remove(self.oldest);
            }
            let entry = Entry { hash, ready_ns, newer: NONE, older: NONE };
            let at = if let Some(at) = self.free.pop() {
                self.entries[at as usize] = entry;
                at
            } else {
                self.entries.push(entry);
                u32::try_from(self.entries.len() - 1).expect("capacity is a u32")
            };
            self.index.insert(hash, at);
            self.link_newest(at);
        }
    }

    /// Takes back those of a request's `blocks` that it had not computed by `now_ns`, when it ended.
    ///
    /// A block that another running request entered earlier keeps that one's instant and stays.
    pub(crate) fn take_back(&mut self, blocks: &[(BlockHash, u64)], now_ns: u64) {
        for &(hash, ready_ns) in blocks.iter().filter(|(_, ready_ns)| *ready_ns > now_ns) {
            if let Some(&at) = self.index.get(&hash)
                && self.entries[at as usize].ready_ns == ready_ns
            {
                self.remove(at);
            }
        }
    }

    fn remove(&mut self, at: u32) {
        self.unlink(at);
        self.index.remove(&self.entries[at as usize].hash);
        self.free.push(at);
    }

    fn unlink(&mut self, at: u32) {
        let Entry { newer, older, .. } = self.entries[at as usize];
        if newer == NONE {
            self.newest = older
        } else {
            self.entries[newer as usize].older = older
        }
        if older == NONE { self.oldest = newer } else { self.entries[older as usize].newer = newer }
    }

    fn link_newest(&mut self, at: u32) {
        let older = self.newest;
        self.entries[at as usize].newer = NONE;
        self.entries[at as usize].older = older;
        if older == NONE {
            self.oldest = at
        } else {
            self.entries[older as usize].newer = at
        }
        self.newest = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(blocks: &[BlockHash]) -> Vec<(BlockHash, u64)> {
        blocks.iter().map(|hash| (*hash, 0)).collect()
    }

    #[test]
    fn a_block_is_named_by_itself_and_all_before_it() {
        let a = block_hashes(&[1, 2, 3, 4, 5, 6], 2);
        assert_eq!(a.len(), 3);
        assert_eq!(block_hashes(&[1, 2, 3, 4, 9], 2), a[..2]);
        let b = block_hashes(&[7, 2, 3, 4], 2);
        assert!(a[0] != b[0] && a[1] != b[1]);
    }

    #[test]
    fn hits_end_at_the_first_block_that_is_missing() {
        let mut cache = Cache::new(10);
        let chain = block_hashes(&[1, 2, 3, 4, 5, 6], 1);
        assert_eq!(cache.hits(&chain, 0), 0);
        cache.enter(&ready(&chain[..2]));
        cache.enter(&ready(&chain[3..4]));
        assert_eq!(cache.hits(&chain, 0), 2);
    }

    #[test]
    fn a_block_counts_from_its_instant_on_and_the_earliest_wins() {
        let mut cache = Cache::new(10);
        cache.enter(&[(1, 100)]);
        assert_eq!((cache.hits(&[1], 99), cache.hits(&[1], 100)), (0, 1));
        cache.enter(&[(1, 200)]);
        assert_eq!(cache.hits(&[1], 100), 1);
        cache.enter(&[(1, 50)]);
        assert_eq!(cache.hits(&[1], 50), 1);
    }

    #[test]
    fn the_least_recently_used_chain_goes_first_and_from_its_end() {
        let mut cache = Cache::new(4);
        cache.enter(&ready(&[1, 2]));
        cache.enter(&ready(&[3, 4]));
        cache.enter(&ready(&[1, 2]));
        cache.enter(&ready(&[5]));
        assert_eq!((cache.hits(&[1, 2], 0), cache.hits(&[3, 4], 0), cache.hits(&[5], 0)), (2, 1, 1));
    }

    #[test]
    fn a_chain_longer_than_the_cache_keeps_its_front() {
        let mut cache = Cache::new(3);
        cache.enter(&ready(&[1, 2, 3, 4, 5]));
        assert_eq!(cache.hits(&[1, 2, 3, 4, 5], 0), 3);
        assert_eq!(cache.entries.len(), 3);
    }

    #[test]
    fn an_empty_cache_caches_nothing() {
        let mut cache = Cache::new(0);
        cache.enter(&ready(&[1]));
        assert_eq!(cache.hits(&[1], 0), 0);
    }

    #[test]
    fn what_was_not_computed_is_taken_back() {
        let mut cache = Cache::new(10);
        cache.enter(&[(2, 40)]);
        let mine = [(1, 10), (2, 50), (3, 50), (4, 60)];
        cache.enter(&mine);
        cache.take_back(&mine, 20);
        assert_eq!(cache.hits(&[1, 2], 40), 2);
        assert_eq!(cache.hits(&[3], 100), 0);
        cache.enter(&ready(&[7, 8]));
        assert_eq!(cache.hits(&[7, 8], 0), 2);
        assert_eq!(cache.entries.len(), 4, "freed places are used again");
    }
}
