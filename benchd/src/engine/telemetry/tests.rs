//! Texts of real servers, and of such as have several engines; and what becomes of a server without metrics.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;

use proto::report::ServerKind;
use proto::wire::Secrets;
use serde_json::json;

use super::*;

fn read(text: &str) -> Reading {
    Reading::of(text).unwrap_or_else(|| panic!("nothing is known of {text}"))
}

// Names.

#[test]
fn a_text_of_vllm() {
    let want = Reading {
        kind: ServerKind::Vllm,
        running: Some(0.0),
        waiting: Some(0.0),
        kv_cache_usage: Some(0.0),
        prompt_tokens: Some(189_144),
        generation_tokens: Some(12_704),
        cache_queries: Some(189_144),
        cache_hits: Some(102_400),
        ttft_count: Some(374),
        ttft_sum_s: Some(10.266_495_466_232_3),
    };
    assert_eq!(read(include_str!("captured/vllm.txt")), want);
}

#[test]
fn a_text_of_the_simulator() {
    let want = Reading {
        kind: ServerKind::Vllm,
        running: Some(0.0),
        waiting: Some(0.0),
        kv_cache_usage: Some(0.0),
        prompt_tokens: Some(9737),
        generation_tokens: Some(268),
        cache_queries: Some(9737),
        cache_hits: Some(4624),
        ttft_count: Some(37),
        ttft_sum_s: Some(0.249_360_329),
    };
    assert_eq!(read(include_str!("captured/benchsim.txt")), want);
}

#[test]
fn a_text_of_llama_cpp_whose_prompt_tokens_leave_out_the_cached_ones() {
    let want = Reading {
        kind: ServerKind::Llamacpp,
        running: Some(0.0),
        waiting: Some(0.0),
        kv_cache_usage: None,
        prompt_tokens: Some(7143 + 8929),
        generation_tokens: Some(436),
        cache_queries: Some(7143 + 8929),
        cache_hits: Some(8929),
        ttft_count: None,
        ttft_sum_s: None,
    };
    assert_eq!(read(include_str!("captured/llamacpp.txt")), want);
}

#[test]
fn an_older_llama_cpp_does_not_count_what_it_had_cached() {
    let got = read("llamacpp:prompt_tokens_total 50\nllamacpp:kv_cache_usage_ratio 0.25\n");
    assert_eq!((got.prompt_tokens, got.cache_queries, got.cache_hits), (None, None, None));
    assert_eq!(got.kv_cache_usage, Some(0.25));
}

#[test]
fn sglangs_cached_tokens_are_summed_over_their_sources_and_its_ranks_are_one_engine() {
    let got = read(
        r#"# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0",pp_rank="0",dp_rank="0",priority=""} 6.0
sglang:num_running_reqs{model_name="m",tp_rank="0",pp_rank="0",dp_rank="0",priority="1"} 4.0
sglang:num_running_reqs{model_name="m",tp_rank="1",pp_rank="0",dp_rank="0",priority=""} 6.0
sglang:num_running_reqs{model_name="m",tp_rank="2",pp_rank="0",dp_rank="1",priority=""} 3.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:token_usage{model_name="m",dp_rank="0"} 0.5
sglang:token_usage{model_name="m",dp_rank="1"} 0.25
sglang:prompt_tokens_total{model_name="m",is_streaming="true"} 8.128902e+06
sglang:prompt_tokens_total{model_name="m",is_streaming="false"} 98.0
sglang:generation_tokens_total{model_name="m",is_streaming="true"} 700.0
sglang:cached_tokens_total{model_name="m",cache_source="device"} 4000.0
sglang:cached_tokens_total{model_name="m",cache_source="host"} 500.0
sglang:cache_hit_rate{model_name="m"} 0.99
sglang:time_to_first_token_seconds_sum{model_name="m",is_streaming="true"} 2.5
sglang:time_to_first_token_seconds_count{model_name="m",is_streaming="true"} 50.0
"#,
    );
    let want = Reading {
        kind: ServerKind::Sglang,
        running: Some(9.0),
        waiting: Some(2.0),
        kv_cache_usage: Some(0.375),
        prompt_tokens: Some(8_129_000),
        generation_tokens: Some(700),
        cache_queries: Some(8_129_000),
        cache_hits: Some(4500),
        ttft_count: Some(50),
        ttft_sum_s: Some(2.5),
    };
    assert_eq!(got, want);
}

#[test]
fn engines_are_summed_but_for_their_share_of_cache_in_use() {
    let engine = |n: u32, running: u32, usage: f64, hits: u64| {
        format!(
            "vllm:num_requests_running{{engine=\"{n}\"}} {running}\nvllm:kv_cache_usage_perc{{engine=\"{n}\"}} {usage}\n\
             vllm:gpu_cache_usage_perc{{engine=\"{n}\"}} {usage}\nvllm:prefix_cache_hits_total{{engine=\"{n}\"}} {hits}\n\
             vllm:time_to_first_token_seconds_sum{{engine=\"{n}\"}} 1.5\n"
        )
    };
    let got = read(&(engine(0, 3, 0.2, 100) + &engine(1, 5, 0.6, 28)));
    assert_eq!((got.running, got.cache_hits, got.ttft_sum_s), (Some(8.0), Some(128), Some(3.0)));
    assert!((got.kv_cache_usage.unwrap() - 0.4).abs() < 1e-12);
}

#[test]
fn what_is_not_known_or_not_a_number_is_absent() {
    for text in [
        "",
        "# TYPE vllm:num_requests_running gauge\n",
        "vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 3\n",
        "vllm:num_requests_running NaN\n",
        "http_requests_total 9\n",
        "<html>vllm:num_requests_running</html>",
    ] {
        assert_eq!(Reading::of(text), None, "{text}");
    }
    let got =
        read("vllm:num_requests_running 1\nvllm:prefix_cache_hits_total -3\nvllm:kv_cache_usage_perc NaN\n");
    assert_eq!((got.running, got.cache_hits, got.kv_cache_usage, got.waiting), (Some(1.0), None, None, None));
}

#[test]
fn a_counter_that_shows_up_later_stood_at_nothing() {
    let mut first = read("sglang:prompt_tokens_total 30\nsglang:num_running_reqs 0\n");
    let last =
        read("sglang:prompt_tokens_total 90\nsglang:cached_tokens_total 16\nsglang:num_queue_reqs 1\n");
    last.started_as(&mut first);
    assert_eq!((first.prompt_tokens, first.cache_hits), (Some(30), Some(0)));
    // A gauge does not begin at 0, and what never shows up stays unknown.
    assert_eq!((first.waiting, first.generation_tokens), (None, None));
}

// Scrapes.

/// Answers one request after another with these bytes; the heads of the requests.
fn server(answers: &[&str]) -> (String, JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answers: Vec<String> = answers.iter().map(|&a| a.to_owned()).collect();
    let thread = std::thread::spawn(move || {
        let answer = |answer: String| {
            let (mut socket, _) = listener.accept().unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                socket.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            socket.write_all(answer.as_bytes()).unwrap();
            if answer.is_empty() {
                // Until the other side has had enough.
                let _ = socket.read(&mut [0]);
            }
            String::from_utf8(head).unwrap()
        };
        answers.into_iter().map(answer).collect()
    });
    (url, thread)
}

fn answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// A scraper of a target with a key, and the metrics elsewhere if so.
fn scraper(url: &str, metrics_url: Option<&str>) -> Option<Scraper> {
    crate::install_tls();
    let target: Target = serde_json::from_value(json!({"url": url, "metrics_url": metrics_url})).unwrap();
    let secrets = Secrets { api_key: Some("sk-123".into()), headers: vec![] };
    Scraper::new(&target, &Server::new(&target, &secrets).unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_key_goes_to_the_server_under_test_alone() {
    let text = answer("200 OK", "vllm:num_requests_running 2\n");
    let (url, requests) = server(&[&text]);
    let reading = scraper(&format!("{url}/v1"), None).unwrap().scrape(EDGE_TIMEOUT).await.unwrap();
    assert_eq!(reading.running, Some(2.0));
    let head = requests.join().unwrap().remove(0);
    assert!(head.starts_with("GET /metrics HTTP/1.1\r\n") && head.contains("Bearer sk-123"), "{head}");

    let (elsewhere, requests) = server(&[&text]);
    let scraper = scraper("http://h:1", Some(&format!("{elsewhere}/m?x=1"))).unwrap();
    scraper.scrape(EDGE_TIMEOUT).await.unwrap();
    let head = requests.join().unwrap().remove(0);
    assert!(head.starts_with("GET /m?x=1 HTTP/1.1\r\n") && !head.contains("sk-123"), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_server_without_metrics_is_asked_once_and_the_report_says_why() {
    for (answer, want) in [
        (answer("404 Not Found", "{}"), "answers with status 404"),
        (answer("200 OK", "<html>welcome</html>"), "has no metric of vLLM, SGLang or llama.cpp"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nvllm:".to_owned(), "cannot be read: "),
    ] {
        let (url, requests) = server(&[&answer]);
        let telescope = Telescope::aim(scraper(&url, None)).await;
        requests.join().unwrap();
        let live = Arc::<Live>::default();
        let following = telescope.follow(&Handle::current(), Clock::start(), live, CancellationToken::new());
        // Ends although the load does not.
        let telemetry = following.await.unwrap();
        let why = telemetry.missing.unwrap();
        assert!(why.contains(want) && why.contains(&url), "{why}");
        assert_eq!((telemetry.readings.len(), telemetry.failed, telemetry.is_whole), (0, 0, false));
    }
    assert!(scraper("http://h:1", Some("off")).is_none());
    assert!(Telescope::aim(None).await.telemetry.missing.unwrap().contains("switched off"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_server_that_hangs_is_left_after_the_timeout() {
    let (url, requests) = server(&[""]);
    let why = scraper(&url, None).unwrap().scrape(Duration::from_millis(50)).await.unwrap_err();
    assert!(why.contains("did not answer within 0.05 s"), "{why}");
    requests.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_last_scrape_comes_after_the_load_and_its_failure_is_told() {
    let text = |hits: u32| answer("200 OK", &format!("vllm:prefix_cache_hits_total {hits}\n"));
    let follow = async |answers: &[&str]| {
        let (url, requests) = server(answers);
        let telescope = Telescope::aim(scraper(&url, None)).await;
        let is_over = CancellationToken::new();
        // A load that is over before its first second.
        is_over.cancel();
        let following = telescope.follow(&Handle::current(), Clock::start(), Arc::default(), is_over);
        let telemetry = following.await.unwrap();
        requests.join().unwrap();
        telemetry
    };
    let whole = follow(&[&text(3), &text(10)]).await;
    let hits: Vec<_> = whole.readings.iter().map(|(_, reading)| reading.cache_hits).collect();
    assert!(whole.is_whole && whole.missing.is_none());
    assert_eq!(hits, [Some(3), Some(10)]);
    assert!(whole.readings[0].0 <= 0 && whole.readings[1].0 >= 0, "{:?}", whole.readings);

    let broken = follow(&[&text(3), &answer("503 Service Unavailable", "")]).await;
    assert_eq!((broken.is_whole, broken.readings.len(), broken.failed), (false, 1, 1));
    assert!(broken.last_failure.unwrap().contains("503"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_start_of_the_measured_part_has_a_scrape_of_its_own() {
    let text = |hits: u32| answer("200 OK", &format!("vllm:prefix_cache_hits_total {hits}\n"));
    let (url, requests) = server(&[&text(1), &text(2), &text(3)]);
    let telescope = Telescope::aim(scraper(&url, None)).await;
    let (live, clock, is_over) = (Arc::<Live>::default(), Clock::start(), CancellationToken::new());
    let from_ns = 20_000_000;
    live.set_measured_from(from_ns);
    let following = telescope.follow(&Handle::current(), clock, live, is_over.clone());
    // Until that of the first second was answered too; nobody is there for those after it.
    requests.join().unwrap();
    is_over.cancel();
    let telemetry = following.await.unwrap();
    let (at_ns, reading) = telemetry.readings[1];
    assert!((from_ns..1_000_000_000).contains(&at_ns), "{at_ns}");
    assert_eq!(reading.cache_hits, Some(2));
    assert!(!telemetry.is_whole);
}
