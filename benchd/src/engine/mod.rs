//! The pipeline from a plan to a report. A stage imports the type it takes and the type it gives; nothing upstream
//! reads a summary; nothing here knows of sockets or wire commands.

pub mod run_data;
pub mod sse;
pub mod chunk;
pub mod clock;
pub mod connect;
pub mod server;
pub mod exchange;
pub mod solve;
pub mod arrival;
pub mod turns;
