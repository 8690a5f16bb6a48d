//! benchd: the instrument. `serve` owns sockets and the control actor; `engine` turns a plan into load, records
//! and a report. Data flows one way:
//!
//! ```text
//! command → Plan → Prepared → Schedule → Turn → exchange → Record → Summary → Report
//!                                          ▲        │
//!                                          └ finished ┘
//! ```

pub mod engine;
