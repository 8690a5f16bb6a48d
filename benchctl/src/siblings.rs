//! Finds the programs that benchctl starts: by their variable, next to the resolved executable, then on PATH.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::exit::Trouble;

/// A program that belongs to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sibling {
    /// The load generator.
    Benchd,
    /// The simulated server.
    Benchsim,
}

impl Sibling {
    /// File name.
    pub fn name(self) -> &'static str {
        match self {
            Sibling::Benchd => "benchd",
            Sibling::Benchsim => "benchsim",
        }
    }

    /// Variable that names it.
    pub fn variable(self) -> &'static str {
        match self {
            Sibling::Benchd => "BENCHD_BIN",
            Sibling::Benchsim => "BENCHSIM_BIN",
        }
    }

    /// Its path.
    pub fn find(self) -> Result<PathBuf, Trouble> {
        let own = std::env::current_exe().and_then(std::fs::canonicalize).ok();
        let folder = own.as_deref().and_then(Path::parent);
        self.find_by(std::env::var_os(self.variable()), folder, std::env::var_os("PATH"))
    }

    fn find_by(
        self,
        named: Option<OsString>,
        folder: Option<&Path>,
        search_path: Option<OsString>,
    ) -> Result<PathBuf, Trouble> {
        if let Some(named) = named.filter(|named| !named.is_empty()) {
            let path = PathBuf::from(named);
            return if path.is_file() {
                Ok(path)
            } else {
                Err(Trouble::internal(format!(
                    "{} names {}, which is not a file",
                    self.variable(),
                    path.display()
                )))
            };
        }
        let on_path =
            search_path.iter().flat_map(std::env::split_paths).filter(|dir| !dir.as_os_str().is_empty());
        folder
            .map(Path::to_owned)
            .into_iter()
            .chain(on_path)
            .map(|folder| folder.join(self.name()))
            .find(|path| path.is_file())
            .ok_or_else(|| {
                Trouble::internal(format!(
                    "{name} was not found next to benchctl, on PATH or by {variable}; build it with `cargo build \
                     --release --workspace`",
                    name = self.name(),
                    variable = self.variable()
                ))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_comes_first_then_our_folder_then_the_path() {
        let ours = tempfile::tempdir().unwrap();
        let theirs = tempfile::tempdir().unwrap();
        for dir in [&ours, &theirs] {
            std::fs::write(dir.path().join("benchd"), "").unwrap();
        }
        let find = |named: Option<OsString>, folder| {
            Sibling::Benchd.find_by(named, folder, Some(theirs.path().as_os_str().to_owned()))
        };
        assert_eq!(find(None, Some(ours.path())).unwrap(), ours.path().join("benchd"));
        assert_eq!(find(None, None).unwrap(), theirs.path().join("benchd"));
        let named = theirs.path().join("benchd").into_os_string();
        assert_eq!(find(Some(named.clone()), Some(ours.path())).unwrap(), PathBuf::from(named));
        let missing = find(Some("/no/benchd".into()), Some(ours.path())).unwrap_err();
        assert!(missing.message.contains("BENCHD_BIN names /no/benchd"), "{missing}");
    }

    #[test]
    fn a_missing_sibling_names_the_build_command() {
        let empty = tempfile::tempdir().unwrap();
        let error = Sibling::Benchsim.find_by(None, Some(empty.path()), None).unwrap_err();
        assert!(error.message.contains("cargo build --release --workspace"), "{error}");
    }
}
