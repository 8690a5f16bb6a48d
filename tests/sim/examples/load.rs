//! How much can benchsim do on this machine? Drains streams from one that runs, and says what it got.
//!
//! ```text
//! benchsim --itl-ms 5 & cargo run --release -p benchsim --example load -- 127.0.0.1:PORT PID 100 1000 5
//! ```
//! Arguments: address, pid, streams at a time, tokens in each, rounds. benchsim itself says at its end, and
//! on /metrics, how late its writes were.

#![allow(clippy::unwrap_used, clippy::print_stdout)] // a tool for developers; a failure may well panic

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [address, pid, streams, tokens, rounds] = &args[..] else {
        panic!("arguments: ADDRESS PID STREAMS TOKENS ROUNDS")
    };
    let (streams, rounds): (usize, usize) = (streams.parse().unwrap(), rounds.parse().unwrap());
    let before_s = cpu_s(pid);
    let start = Instant::now();
    let events: usize = std::thread::scope(|scope| {
        let drains: Vec<_> =
            (0..streams).map(|stream| scope.spawn(move || drain(address, stream, tokens, rounds))).collect();
        drains.into_iter().map(|drain| drain.join().unwrap()).sum()
    });
    let took_s = start.elapsed().as_secs_f64();
    let cpu_s = cpu_s(pid) - before_s;
    println!(
        "{events} content events in {took_s:.2} s: {:.0}/s; benchsim used {:.0} % of a core, {:.1} µs an event",
        events as f64 / took_s,
        100.0 * cpu_s / took_s,
        1e6 * cpu_s / events as f64,
    );
    let mut metrics = TcpStream::connect(address.as_str()).unwrap();
    metrics.write_all(b"GET /metrics HTTP/1.1\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    metrics.read_to_string(&mut text).unwrap();
    text.lines().filter(|line| line.starts_with("benchsim:")).for_each(|line| println!("{line}"));
}

/// Requests one after another on one connection; the content events that came.
fn drain(address: &str, stream: usize, tokens: &str, rounds: usize) -> usize {
    let mut socket = TcpStream::connect(address).unwrap();
    let mut buffer = vec![0; 1 << 16];
    let mut events = 0;
    for round in 0..rounds {
        let body = format!(
            r#"{{"model":"sim","stream":true,"max_tokens":{tokens},"messages":[{{"role":"user","content":"stream {stream} round {round}"}}]}}"#
        );
        let length = body.len();
        write!(socket, "POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {length}\r\n\r\n{body}")
            .unwrap();
        let mut received = Vec::new();
        while !received.ends_with(b"0\r\n\r\n") {
            let n = socket.read(&mut buffer).unwrap();
            assert!(n > 0, "closed early");
            received.extend_from_slice(&buffer[..n]);
        }
        // Each event has one choice; the role and the finish chunk are no content.
        events += received.windows(8).filter(|window| window == b"\"index\":").count() - 2;
    }
    events
}

/// User and system time of a process so far, in s.
fn cpu_s(pid: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    // utime and stime, in ticks of 1/100 s
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}
