//! Tells which requests had a connection made for them. A layer around the HTTP client's connector marks the task
//! in which a connection attempt succeeded; a pooled connection marks nothing.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tower_layer::Layer;
use tower_service::Service;

tokio::task_local! {
    static CONNECTED: Cell<bool>;
}

/// Runs a request and tells whether a connection was made for it.
///
/// The client polls its connector inside the request's own future, unless a pooled connection became free first;
/// then the attempt goes on in a task of its own, where no mark can be set, and the request did not wait for it.
pub async fn watch<F: Future>(request: F) -> (F::Output, bool) {
    CONNECTED
        .scope(Cell::new(false), async move {
            let output = request.await;
            (output, CONNECTED.with(Cell::get))
        })
        .await
}

/// The layer that sets the mark.
#[derive(Clone, Copy, Debug)]
pub struct WatchConnects;

impl<S> Layer<S> for WatchConnects {
    type Service = WatchedConnector<S>;
    fn layer(&self, inner: S) -> Self::Service {
        WatchedConnector { inner }
    }
}

/// A connector that sets the mark.
#[derive(Clone, Debug)]
pub struct WatchedConnector<S> {
    inner: S,
}

impl<S, R> Service<R> for WatchedConnector<S>
where
    S: Service<R>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, destination: R) -> Self::Future {
        let attempt = self.inner.call(destination);
        Box::pin(async move {
            let connection = attempt.await;
            if connection.is_ok() {
                // Outside a watched request there is no mark to set.
                let _ = CONNECTED.try_with(|mark| mark.set(true));
            }
            connection
        })
    }
}
