//! What vLLM, SGLang and llama.cpp call their counters and gauges, and one reading of them: a text of `/metrics` in
//! any of these names becomes the same [`Reading`].

use std::collections::BTreeMap;

use proto::report::ServerKind;

use super::prometheus::{Point, points};

/// Labels by which the processes of one engine differ that all report the same gauge.
const RANKS: [&str; 4] = ["tp_rank", "pp_rank", "moe_ep_rank", "pid"];

/// A server's counters and gauges at one instant, summed over its engines; what it does not tell is absent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// Whose names these are.
    pub kind: ServerKind,
    /// Requests in the running batch.
    pub running: Option<f64>,
    /// Requests waiting.
    pub waiting: Option<f64>,
    /// Share of the KV cache in use by requests, mean over the engines, 0 to 1.
    pub kv_cache_usage: Option<f64>,
    /// Prompt tokens so far, cached ones included.
    pub prompt_tokens: Option<u64>,
    /// Output tokens so far.
    pub generation_tokens: Option<u64>,
    /// Prompt tokens looked up in the prefix cache so far.
    pub cache_queries: Option<u64>,
    /// Of these, found there.
    pub cache_hits: Option<u64>,
    /// Requests whose time to first token was taken so far.
    pub ttft_count: Option<u64>,
    /// Their times, in seconds.
    pub ttft_sum_s: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Field {
    Running,
    Waiting,
    KvCacheUsage,
    PromptTokens,
    GenerationTokens,
    CacheQueries,
    CacheHits,
    TtftCount,
    TtftSum,
}

impl Field {
    fn is_gauge(self) -> bool {
        matches!(self, Field::Running | Field::Waiting | Field::KvCacheUsage)
    }
}

/// vLLM's names, behind `vllm:`.
const VLLM: [(&str, Field); 10] = [
    ("num_requests_running", Field::Running),
    ("num_requests_waiting", Field::Waiting),
    ("kv_cache_usage_perc", Field::KvCacheUsage),
    // In older versions.
    ("gpu_cache_usage_perc", Field::KvCacheUsage),
    ("prompt_tokens_total", Field::PromptTokens),
    ("generation_tokens_total", Field::GenerationTokens),
    // Its older gpu_prefix_cache_… counted blocks in some versions and tokens in others.
    ("prefix_cache_queries_total", Field::CacheQueries),
    ("prefix_cache_hits_total", Field::CacheHits),
    ("time_to_first_token_seconds_count", Field::TtftCount),
    ("time_to_first_token_seconds_sum", Field::TtftSum),
];

/// SGLang's names, behind `sglang:`. Its prompt tokens include the cached ones.
const SGLANG: [(&str, Field); 8] = [
    ("num_running_reqs", Field::Running),
    ("num_queue_reqs", Field::Waiting),
    ("token_usage", Field::KvCacheUsage),
    ("prompt_tokens_total", Field::PromptTokens),
    ("generation_tokens_total", Field::GenerationTokens),
    ("cached_tokens_total", Field::CacheHits),
    ("time_to_first_token_seconds_count", Field::TtftCount),
    ("time_to_first_token_seconds_sum", Field::TtftSum),
];

/// llama.cpp's names, behind `llamacpp:`. Its prompt tokens leave out the cached ones.
const LLAMACPP: [(&str, Field); 6] = [
    ("requests_processing", Field::Running),
    ("requests_deferred", Field::Waiting),
    // Older versions have it.
    ("kv_cache_usage_ratio", Field::KvCacheUsage),
    ("prompt_tokens_total", Field::PromptTokens),
    ("tokens_predicted_total", Field::GenerationTokens),
    ("prompt_tokens_cached_total", Field::CacheHits),
];

/// Names behind a prefix, and what they are.
type Names = &'static [(&'static str, Field)];

const KINDS: [(ServerKind, &str, Names); 3] = [
    (ServerKind::Vllm, "vllm:", &VLLM),
    (ServerKind::Sglang, "sglang:", &SGLANG),
    (ServerKind::Llamacpp, "llamacpp:", &LLAMACPP),
];

impl Reading {
    /// Reads a text; `None` when it has none of the names.
    pub fn of(text: &str) -> Option<Reading> {
        let mut sums = Sums::default();
        for point in points(text) {
            let known = KINDS.iter().find_map(|(kind, prefix, names)| {
                let name = point.name.strip_prefix(prefix)?;
                let (_, field) = names.iter().find(|(known, _)| *known == name)?;
                Some((*kind, *field))
            });
            if let Some((kind, field)) = known {
                sums.add(kind, field, &point);
            }
        }
        sums.reading()
    }

    /// The counters that an earlier reading lacks and this one has stood at 0 then: Prometheus clients first show a
    /// labelled counter when it is first counted up.
    pub fn started_as(self, earlier: &mut Reading) {
        fn start<T: Copy + Default>(now: Option<T>, then: &mut Option<T>) {
            *then = then.or(now.map(|_| T::default()));
        }
        start(self.prompt_tokens, &mut earlier.prompt_tokens);
        start(self.generation_tokens, &mut earlier.generation_tokens);
        start(self.cache_queries, &mut earlier.cache_queries);
        start(self.cache_hits, &mut earlier.cache_hits);
        start(self.ttft_count, &mut earlier.ttft_count);
        start(self.ttft_sum_s, &mut earlier.ttft_sum_s);
    }
}

/// What was found of a text so far. The kind is that of the first known name.
#[derive(Debug, Default)]
struct Sums {
    kind: Option<ServerKind>,
    counters: BTreeMap<Field, f64>,
    /// By engine.
    gauges: BTreeMap<Field, BTreeMap<String, f64>>,
}

impl Sums {
    fn add(&mut self, kind: ServerKind, field: Field, point: &Point<'_>) {
        if !point.value.is_finite() || *self.kind.get_or_insert(kind) != kind {
            return;
        }
        if !field.is_gauge() {
            *self.counters.entry(field).or_default() += point.value;
            return;
        }
        // SGLang repeats a gauge by priority beside its total.
        if point.label("priority").is_some_and(|priority| !priority.is_empty()) {
            return;
        }
        let mut labels: Vec<String> = point
            .labels
            .iter()
            .filter(|(name, _)| !RANKS.contains(name))
            .map(|(name, value)| format!("{name}={value:?}"))
            .collect();
        labels.sort_unstable();
        // Two names of one gauge are the same gauge.
        let engine = self.gauges.entry(field).or_default().entry(labels.join(",")).or_insert(point.value);
        *engine = engine.max(point.value);
    }

    fn reading(&self) -> Option<Reading> {
        let gauge = |field| {
            let engines = self.gauges.get(&field)?;
            let sum: f64 = engines.values().sum();
            Some(if field == Field::KvCacheUsage { sum / engines.len() as f64 } else { sum })
        };
        let counter = |field| self.counters.get(&field).copied();
        let whole = |field| counter(field).and_then(whole);
        let kind = self.kind?;
        let (prompt_tokens, cache_hits) = (whole(Field::PromptTokens), whole(Field::CacheHits));
        let (prompt_tokens, cache_queries) = match kind {
            ServerKind::Vllm => (prompt_tokens, whole(Field::CacheQueries)),
            ServerKind::Sglang => (prompt_tokens, prompt_tokens),
            ServerKind::Llamacpp => {
                let all = prompt_tokens.zip(cache_hits).map(|(new, cached)| new + cached);
                (all, all)
            }
        };
        Some(Reading {
            kind,
            running: gauge(Field::Running),
            waiting: gauge(Field::Waiting),
            kv_cache_usage: gauge(Field::KvCacheUsage),
            prompt_tokens,
            generation_tokens: whole(Field::GenerationTokens),
            cache_queries,
            cache_hits,
            ttft_count: whole(Field::TtftCount),
            ttft_sum_s: counter(Field::TtftSum),
        })
    }
}

/// A counter of things.
fn whole(value: f64) -> Option<u64> {
    const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;
    // Within these bounds the conversion is exact but for a fraction, which no count of things has.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    (0.0..LARGEST_EXACT).contains(&value).then(|| value.round() as u64)
}
