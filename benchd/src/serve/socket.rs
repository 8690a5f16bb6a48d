//! The daemon's socket: who may take the path, and who may connect.

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// A daemon answers there.
    #[error("a benchd (pid {pid}) already serves {path}; stop it, or choose another --socket")]
    Live {
        /// The socket's path.
        path: String,
        /// Its process, as far as the kernel tells.
        pid: String,
    },
    /// Something else lies there.
    #[error("{path} exists and is no socket; choose another --socket")]
    NotASocket {
        /// The path.
        path: String,
    },
    /// The system's refusal.
    #[error("cannot listen at {path}: {source}")]
    Io {
        /// The path.
        path: String,
        /// Why.
        source: std::io::Error,
    },
}

/// A bound socket, whose file goes with it.
#[derive(Debug)]
pub struct Socket {
    /// Where connections come in.
    pub listener: UnixListener,
    file: SocketFile,
}

/// The file of a socket that we bound; removed when dropped.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Socket {
    /// Binds `path` for our own user alone. A dead daemon's file is replaced, a live one's never.
    pub fn bind(path: &Path) -> Result<Self, BindError> {
        let shown = || path.display().to_string();
        let io = |source| BindError::Io { path: shown(), source };
        if let Ok(metadata) = std::fs::symlink_metadata(path) {
            if !metadata.file_type().is_socket() {
                return Err(BindError::NotASocket { path: shown() });
            }
            if let Ok(stream) = std::os::unix::net::UnixStream::connect(path) {
                let pid = rustix::net::sockopt::socket_peercred(&stream)
                    .map_or_else(|_| "unknown".to_owned(), |c| c.pid.as_raw_nonzero().to_string());
                return Err(BindError::Live { path: shown(), pid });
            }
            std::fs::remove_file(path).map_err(io)?;
        }
        let listener = UnixListener::bind(path).map_err(io)?;
        let file = SocketFile(path.to_owned());
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(io)?;
        Ok(Socket { listener, file })
    }

    /// The listener, and the file to keep while it serves.
    pub fn into_parts(self) -> (UnixListener, SocketFile) {
        (self.listener, self.file)
    }
}

/// Whether the peer is our own user or root.
pub fn peer_is_allowed(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == rustix::process::getuid().as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_live_socket_is_kept_and_a_dead_one_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("b.sock");
        let live = Socket::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        let refused = Socket::bind(&path).unwrap_err().to_string();
        assert!(refused.contains(&format!("pid {}", std::process::id())), "{refused}");
        // Forgetting the file leaves what a killed daemon leaves.
        let (listener, file) = live.into_parts();
        std::mem::forget(file);
        drop(listener);
        assert!(Socket::bind(&path).is_ok());
        assert!(!path.exists(), "the file went with the socket");
    }

    #[tokio::test]
    async fn a_file_that_is_no_socket_is_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        assert!(matches!(Socket::bind(&path), Err(BindError::NotASocket { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
    }
}
