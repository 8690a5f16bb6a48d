//! The pipeline from a plan to a report, in the order in which data meets it. A stage imports the type it takes and
//! the type it gives; nothing upstream reads a summary; nothing here knows of sockets or wire commands.

// Plan → Prepared
pub mod solve;
pub mod tokenizer;
pub mod words;

pub mod prepare;
pub mod probe;
pub mod server;
pub mod smoke;

// → Schedule → Arrival → Turn
pub mod arrival;
pub mod clock;
pub mod prompts;
pub mod schedule;
pub mod session;
pub mod turns;

// → exchange → Record
pub mod chunk;
pub mod connect;
pub mod exchange;
pub mod recorder;
pub mod sse;

// What can be seen of it meanwhile, of ourselves and of the server
pub mod live;
pub mod machine;
pub mod observer;
pub mod telemetry;
pub mod watch;

// The run as a whole → RunData → Summary → Report
pub mod environment;
pub mod run;
pub mod run_data;
pub mod summary;
pub mod verdict;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use sha2::{Digest, Sha256};

/// A random generator for one purpose of a run: equal seed and purpose give equal draws, other purposes other ones.
pub fn seeded(seed: u64, purpose: &str) -> ChaCha8Rng {
    let mut digest = Sha256::new();
    digest.update(seed.to_le_bytes());
    digest.update(purpose.as_bytes());
    ChaCha8Rng::from_seed(digest.finalize().into())
}
