//! benchd
