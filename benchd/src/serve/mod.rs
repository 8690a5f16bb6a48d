//! The daemon's outside: its socket, its connections, and the control actor that alone owns what it is doing. Uses
//! the engine; the engine knows nothing of it.

pub mod connection;
pub mod control;
pub mod socket;

use proto::wire::Secrets;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use control::Control;

/// Time for connections to write their last lines when the daemon goes down.
const LAST_WORDS: std::time::Duration = std::time::Duration::from_secs(2);

/// Serves a bound socket until `quit` is cancelled or a client asks for it; then ends the run that is going on, lets
/// its report be read, and returns. `engine` is the runtime of the data plane.
pub async fn serve(
    listener: UnixListener,
    secrets: Secrets,
    engine: tokio::runtime::Handle,
    quit: CancellationToken,
) {
    let connections = TaskTracker::new();
    let (control, actor) = Control::start(secrets, engine, quit.clone());
    loop {
        let stream = tokio::select! {
            () = quit.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                // Out of file descriptors, most likely: those in use end some time.
                Err(_) => {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        if socket::peer_is_allowed(&stream) {
            connections.spawn(connection::handle(stream, control.clone(), quit.clone()));
        }
    }
    drop(control);
    connections.close();
    // The actor ends when the run has ended; its report goes to a connection first.
    let _ = actor.await;
    let _ = tokio::time::timeout(LAST_WORDS, connections.wait()).await;
}
