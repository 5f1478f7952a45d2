//! Measures tokio's `DelayQueue`.
//!
//! The protocol and the measurements are those of benchmarks/timer/peers.py. A `DelayQueue` belongs
//! to one task and runs no callback: "firing" is the receipt of an expired entry.

use std::future::poll_fn;
use std::io::{stdin, BufRead};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio_util::time::delay_queue::{DelayQueue, Key};

const CONSTANT: Duration = Duration::from_secs(60);

fn main() {
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let delays = Random(1).delays(100_000, 30_000, 90_000);
    let mut line = String::new();
    while stdin().lock().read_line(&mut line).unwrap() > 0 {
        let words: Vec<&str> = line.split_whitespace().collect();
        let pending: usize = words[1].parse().unwrap();
        let calls: usize = words[2].parse().unwrap();
        match words[0] {
            "calls" => measure_calls(&runtime, &delays, pending, calls),
            "backlog" => measure_backlog(&runtime, calls),
            "ontime" => measure_on_time(&runtime, calls),
            "pending" => measure_pending(&runtime, &delays, pending, calls as u64),
            "lateness" => measure_lateness(&runtime, calls),
            _ => panic!("{line}"),
        }
        println!("ok");
        line.clear();
    }
}

fn measure_calls(runtime: &Runtime, delays: &[Duration], pending: usize, calls: usize) {
    let _inside = runtime.enter();
    let mut queue = filled(delays, pending);
    for _ in 0..calls / 4 {
        let key = queue.insert((), CONSTANT);
        queue.remove(&key);
    }
    pause("begin");
    for _ in 0..calls {
        let key = queue.insert((), CONSTANT);
        queue.remove(&key);
    }
    pause(&format!("end pair {calls}"));
    pause("begin");
    for &delay in delays.iter().cycle().take(calls) {
        let key = queue.insert((), delay);
        queue.remove(&key);
    }
    pause(&format!("end varied {calls}"));
    let mut keys: Vec<Key> = Vec::with_capacity(calls);
    pause("begin");
    for &delay in delays.iter().cycle().take(calls) {
        keys.push(queue.insert((), delay));
    }
    pause(&format!("end start {calls}"));
    pause("begin");
    for key in &keys {
        queue.remove(key);
    }
    pause(&format!("end cancel {calls}"));
}

fn measure_backlog(runtime: &Runtime, calls: usize) {
    runtime.block_on(async {
        let mut queue = DelayQueue::new();
        for delay in Random(2).delays(calls, 1, 1_000) {
            queue.insert((), delay);
        }
        std::thread::sleep(Duration::from_millis(1_300));
        pause("begin");
        while poll_fn(|context| queue.poll_expired(context))
            .await
            .is_some()
        {}
        pause(&format!("end backlog {calls}"));
    });
}

fn measure_on_time(runtime: &Runtime, calls: usize) {
    runtime.block_on(async {
        let mut queue = DelayQueue::new();
        for delay in Random(2).delays(calls, 1_000, 1_000 + calls as u64 / 100) {
            queue.insert((), delay);
        }
        pause("begin");
        while poll_fn(|context| queue.poll_expired(context))
            .await
            .is_some()
        {}
        pause(&format!("end ontime {calls}"));
    });
}

/// The reader measures the growth of the process.
fn measure_pending(runtime: &Runtime, delays: &[Duration], count: usize, milliseconds: u64) {
    let time = Duration::from_millis(milliseconds);
    runtime.block_on(async {
        pause("begin");
        tokio::time::sleep(time).await;
        pause("end empty 1");
        pause("begin");
        let mut queue = filled(delays, count);
        pause(&format!("end memory {count}"));
        pause("begin");
        let next = poll_fn(|context| queue.poll_expired(context));
        assert!(tokio::time::timeout(time, next).await.is_err());
        pause("end idle 1");
    });
}

fn measure_lateness(runtime: &Runtime, calls: usize) {
    let mut late = Vec::with_capacity(calls);
    runtime.block_on(async {
        let mut queue = DelayQueue::new();
        for delay in Random(2).delays(calls, 1, 100) {
            queue.insert(Instant::now() + delay, delay);
        }
        while let Some(expired) = poll_fn(|context| queue.poll_expired(context)).await {
            let (due, now) = (expired.into_inner(), Instant::now());
            late.push(if now < due {
                -(due - now).as_secs_f64() * 1e6
            } else {
                (now - due).as_secs_f64() * 1e6
            });
        }
    });
    late.sort_by(f64::total_cmp);
    println!("value p50_us {}", late[calls / 2]);
    println!("value p99_us {}", late[calls * 99 / 100]);
    println!("value least_us {}", late[0]);
}

fn filled(delays: &[Duration], pending: usize) -> DelayQueue<()> {
    let mut queue = DelayQueue::new();
    for &delay in delays.iter().cycle().take(pending) {
        queue.insert((), delay);
    }
    queue
}

fn pause(text: &str) {
    println!("{text}");
    stdin().lock().read_line(&mut String::new()).unwrap();
}

/// A generator of Lehmer, so that no other crate is needed.
struct Random(u64);

impl Random {
    fn delays(mut self, count: usize, low: u64, high: u64) -> Vec<Duration> {
        let mut draw = || {
            self.0 = self.0 * 48_271 % 0x7fff_ffff;
            Duration::from_millis(low + self.0 % (high - low + 1))
        };
        (0..count).map(|_| draw()).collect()
    }
}
