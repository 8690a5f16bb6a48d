//! The server's own metrics while it is under load: scraped once a second on the data runtime, over connections of
//! their own, beside the requests and never before one. A [`Scraper`] takes the first scrape before the load, a task
//! follows it until the last answer, and the [`Telemetry`] that it leaves goes to the summary as it is.

mod names;
mod prometheus;

use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::plan::{METRICS_OFF, Target};
use proto::wire::{ErrorCode, Failure};
use reqwest::Url;
use reqwest::header::{ACCEPT, HeaderMap, HeaderValue, USER_AGENT};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::engine::clock::Clock;
use crate::engine::live::Live;
use crate::engine::server::{Server, chain};

pub use names::Reading;

/// Time between two scrapes.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time for one of them; the next is not asked for before.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Time for the first and the last one, without which nothing can be counted over the run.
const EDGE_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of a text, beyond which it is taken for something else; vLLM's has some 50 kB.
const LONGEST: usize = 16 << 20;

/// What was seen of the server's metrics during a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Telemetry {
    /// Where they are, secrets removed; absent when they were switched off.
    pub url: Option<String>,
    /// Why there are none.
    pub missing: Option<String>,
    /// What was read and when it was asked for, in ns of the run's clock. The first is from before the load; whether
    /// the last is from after it says `is_whole`.
    pub readings: Vec<(i64, Reading)>,
    /// Whether the scrape after the last answer gave a reading.
    pub is_whole: bool,
    /// Scrapes that gave none.
    pub failed: u64,
    /// Why the last of these did not.
    pub last_failure: Option<String>,
}

impl Telemetry {
    fn missing(url: Option<String>, why: String) -> Self {
        Telemetry { url, missing: Some(why), ..Telemetry::default() }
    }
}

/// Where the metrics are, and how to ask for them.
#[derive(Clone, Debug)]
pub struct Scraper {
    server: Server,
    url: Url,
    headers: HeaderMap,
}

impl Scraper {
    /// The scraper for a target; `None` when its metrics are switched off.
    pub fn new(target: &Target, server: &Server) -> Result<Option<Self>, Failure> {
        let url = match target.metrics_url.as_deref() {
            Some(METRICS_OFF) => return Ok(None),
            Some(url) => url.to_owned(),
            None => server.url("/metrics"),
        };
        let url = Url::parse(&url).map_err(|e| {
            Failure::new(ErrorCode::BadValue, format!("metrics_url cannot be used: {e}, got {url:?}"))
        })?;
        let mut headers = HeaderMap::new();
        // Keys are for the server under test alone.
        if url.origin() == server.chat_url.origin() {
            headers.clone_from(&server.headers);
        } else if let Some(agent) = server.headers.get(USER_AGENT) {
            headers.insert(USER_AGENT, agent.clone());
        }
        headers.insert(ACCEPT, HeaderValue::from_static("text/plain"));
        Ok(Some(Scraper { server: server.clone(), url, headers }))
    }

    fn shown(&self) -> String {
        self.server.redact(self.url.as_str())
    }

    /// The metrics as they are now.
    pub async fn scrape(&self, timeout: Duration) -> Result<Reading, String> {
        let failed = |error: reqwest::Error| {
            if error.is_timeout() {
                format!("{} did not answer within {} s", self.shown(), timeout.as_secs_f64())
            } else {
                format!(
                    "{} cannot be read: {}",
                    self.shown(),
                    self.server.redact(&chain(&error.without_url()))
                )
            }
        };
        // A connection of its own, so that no request finds the one that it would have taken in use.
        let request = self.server.fresh_client.get(self.url.clone());
        let request = request.headers(self.headers.clone()).timeout(timeout);
        let mut response = request.send().await.map_err(failed)?;
        if !response.status().is_success() {
            return Err(format!("{} answers with status {}", self.shown(), response.status().as_u16()));
        }
        let mut text = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(failed)? {
            text.extend_from_slice(&chunk);
            if text.len() > LONGEST {
                return Err(format!("{} has more than {} MiB", self.shown(), LONGEST >> 20));
            }
        }
        // Away from the threads that read answers.
        let reading = tokio::task::spawn_blocking(move || Reading::of(&String::from_utf8_lossy(&text)));
        let reading = reading.await.map_err(|e| format!("the metrics cannot be read: {e}"))?;
        reading.ok_or_else(|| format!("{} has no metric of vLLM, SGLang or llama.cpp", self.shown()))
    }
}

/// A server that is ready to be followed, or why it cannot be.
#[derive(Debug)]
pub struct Telescope {
    telemetry: Telemetry,
    aimed: Option<(Scraper, Instant, Reading)>,
}

impl Telescope {
    /// Takes the first scrape, after the last request of the preparation. A server without metrics is not asked again.
    pub async fn aim(scraper: Option<Scraper>) -> Self {
        let Some(scraper) = scraper else {
            let telemetry = Telemetry::missing(None, "the server's metrics were switched off".to_owned());
            return Telescope { telemetry, aimed: None };
        };
        let url = Some(scraper.shown());
        let asked = Instant::now();
        match scraper.scrape(EDGE_TIMEOUT).await {
            Ok(reading) => Telescope {
                telemetry: Telemetry { url, ..Telemetry::default() },
                aimed: Some((scraper, asked, reading)),
            },
            Err(why) => Telescope { telemetry: Telemetry::missing(url, why), aimed: None },
        }
    }

    /// Follows the load until `is_over`, and takes a last scrape then.
    pub fn follow(
        self,
        runtime: &Handle,
        clock: Clock,
        live: Arc<Live>,
        is_over: CancellationToken,
    ) -> JoinHandle<Telemetry> {
        let Telescope { mut telemetry, aimed } = self;
        runtime.spawn(async move {
            if let Some((scraper, asked, reading)) = aimed {
                telemetry.readings.push((-clock.ns_since(asked), reading));
                let mut log = Log { scraper, clock, telemetry: &mut telemetry };
                tokio::select! {
                    biased;
                    () = is_over.cancelled() => {}
                    () = log.keep(&live) => {}
                }
                telemetry.is_whole = log.add(EDGE_TIMEOUT).await;
            }
            telemetry
        })
    }
}

/// Scrapes and writes down.
struct Log<'a> {
    scraper: Scraper,
    clock: Clock,
    telemetry: &'a mut Telemetry,
}

impl Log<'_> {
    /// A scrape each second, and one at the start of the measured part; without end.
    async fn keep(&mut self, live: &Live) {
        let mut seconds = tokio::time::interval_at((self.clock.instant(0) + INTERVAL).into(), INTERVAL);
        seconds.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let clock = self.clock;
        let measured = async {
            let from_ns = live.measured_from_ns().await;
            tokio::time::sleep_until(clock.instant(from_ns).into()).await;
        };
        tokio::pin!(measured);
        let mut is_measured = false;
        loop {
            tokio::select! {
                () = &mut measured, if !is_measured => is_measured = true,
                _ = seconds.tick() => {}
            }
            self.add(TIMEOUT).await;
        }
    }

    /// One scrape; whether it gave a reading.
    async fn add(&mut self, timeout: Duration) -> bool {
        let asked_ns = self.clock.now_ns();
        let scraped = self.scraper.scrape(timeout).await;
        let is_read = scraped.is_ok();
        match scraped {
            Ok(reading) => self.telemetry.readings.push((asked_ns, reading)),
            Err(why) => {
                self.telemetry.failed += 1;
                self.telemetry.last_failure = Some(why);
            }
        }
        is_read
    }
}

#[cfg(test)]
mod tests;
