//! Whole-system tests; see `support`.
