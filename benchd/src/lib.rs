//! benchd: the instrument. `serve` owns sockets and the control actor; `engine` turns a plan into load, records
//! and a report. Data flows one way:
//!
//! ```text
//! command → Plan → Prepared → Schedule → Turn → exchange → Record → Summary → Report
//!                                          ▲        │
//!                                          └ finished ┘
//! ```

pub mod engine;
pub mod serve;

/// Chooses the cryptography of TLS for the whole process; to be called before the first client is made.
pub fn install_tls() {
    // A second call finds the first one's choice, which is the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
