//! benchctl: hands and eyes of benchd. It reads the command line, starts a private benchd (and, with `--sim`, the
//! simulated server), sends it one command, shows progress, and prints and saves what comes back.
//!
//! ```text
//! argv → secrets → args → asked (Plan) → save (where to) → private (benchd, benchsim)
//!                                                   │
//!            exit ← render ← Report, records ← commands → progress
//! ```

pub mod args;
pub mod asked;
pub mod child;
pub mod commands;
pub mod exit;
pub mod private;
pub mod progress;
pub mod render;
pub mod save;
pub mod secrets;
pub mod siblings;
pub mod signals;
pub mod talk;

#[cfg(test)]
mod fake_daemon;
#[cfg(test)]
mod sample;
