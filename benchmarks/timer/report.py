"""The page `docs/benchmarks/timer.md`: the targets, the tables, and how it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks._page import Origin, figure, table
from benchmarks.timer.child import CANCELS_PER_ADVANCE, CANCELS_PER_START, CHUNK, THREADS
from benchmarks.timer.peers import ASYNCIO, HASHED, HIERARCHICAL, JDK, KAFKA, NETTY, SPARSE
from benchmarks.timer.steps import FEW, MANY, MILLION, MOST, Results, Scale

NOTES = f"""\
How it is measured:

* Each timer has a process of its own. Costs are CPU time of that process in nanoseconds for each
  call, as the kernel counts it, of all threads: the timer's own thread, the garbage collector and
  the just-in-time compiler are included, after a warm-up. Medians; the processes take turns.
  Lateness and pairs/s are wall time and depend on other programs.
* Pair: start a timeout of 60 s and cancel it. "delays vary": the delay is random, from 30 to 90 s
  in steps of 1 ms, and was drawn before the clock started. Pending timeouts have such delays too.
  Start: timeouts with such delays, none of which is canceled; cancel: the same timeouts, in the
  order of their starts. A phase has as many calls as fit into {{burst:g}} ms, at most a million.
* Firing, backlog: {{fired:,}} timeouts with random delays of 1 ms to 1 s are all due when the clock
  starts. Firing, on time: as many with random delays of 1 s to {{last:g}} s, about a hundred for
  each millisecond; the clock starts after the last start. Both end when the last task has run.
  Tasks do nothing. With a backlog, a timer that is driven by ticks processes all of them at one
  wake-up. "On time" includes the wake-ups that firing takes in practice; it is the fair comparison.
* Netty's `HashedWheelTimer` has ticks of 1 ms, and 512 (its default) or 65,536 slots; ratios are
  to the faster of the two. Its worker links and unlinks timeouts at its ticks, and a pair that is
  canceled before the next tick is never linked. The clock stops after the worker has finished.
  Kafka's `SystemTimer` has its defaults and runs with its `SystemTimerReaper`. The JDK's
  `ScheduledThreadPoolExecutor` has one thread and removes canceled tasks. Each of these has its own
  virtual machine with a heap of 2 to 4 GB and otherwise default options. Go has a goroutine for
  each task; its scheduler cannot be kept from firing, so there is no backlog. tokio's `DelayQueue`
  runs no tasks; firing is the receipt of an expired entry, and it is used by one thread, without
  locks.
* `HashedWheel` has ticks of 1 ms and 65,536 slots, the other queues their defaults. The pure form
  is measured on time only with its default queue.
* Event loops run one iteration after every {CHUNK:,} calls, which is included.
* Bytes: the growth of the process (Python, Rust), or of the heap after a collection (Java, Go).
  `gc.collect()`: a full collection of Python. Idle: nothing is due; wake-ups of all threads beyond
  those of the same wait without timeouts, and CPU time of the process, each for one second.
* Longest call: while {{stall:,}} pending timeouts are canceled, one is started after every
  {CANCELS_PER_START} cancels, and the timer is advanced without due timeouts (or the loop runs one
  iteration) after every {CANCELS_PER_ADVANCE:,}. CPU time of the thread, without the cyclic garbage
  collector, the smallest of the maxima of three runs.
* Lateness: {{late:,}} timeouts with random delays of 1 to 100 ms. Four threads: {THREADS} threads
  start and cancel timeouts of one timer.
"""

Get = Callable[[Results], float | None]


def of(name: str, key: str) -> Get:
    """One figure, if it was measured."""
    return lambda results: results.get(name, {}).get(key)


def best(names: Sequence[str], key: str) -> Get:
    """The least of these subjects."""
    return lambda results: min(
        (results[name][key] for name in names if key in results.get(name, {})), default=None
    )


def ratio(one: Get, other: Get) -> Get:
    """A figure relative to another."""

    def get(results: Results) -> float | None:
        first, second = one(results), other(results)
        return first / second if first and second else None

    return get


@dataclass(frozen=True, slots=True)
class Target:
    """A figure, and what it must be. The subject is the default queue on `WheelTimer`."""

    text: str
    measured: Get
    sign: str
    goal: float
    unit: str = "×"

    def verdict(self, results: Results) -> tuple[str, str, str, str]:
        """The name, the measured value, the target, and whether it is met."""
        value = self.measured(results)
        asked = f"{self.sign} {figure(self.goal)}{self.unit}"
        if value is None:
            return self.text, "–", asked, "not measured"
        met = value >= self.goal if self.sign == "≥" else value <= self.goal
        return self.text, f"{figure(value)}{self.unit}", asked, "met" if met else "**missed**"


def _longest_ms(results: Results) -> float | None:
    found = results.get(HIERARCHICAL, {})
    calls = [found[key] for key in ("cancel_us", "start_us", "advance_us") if key in found]
    return max(calls) / 1e3 if calls else None


PAIR, VARIED = f"pair {FEW}", f"varied {FEW}"
PURE = f"{SPARSE}, pure"  # the default queue in pure Python


def _firing(text: str, key: str) -> Iterator[Target]:
    own = of(HIERARCHICAL, key)
    yield Target(f"firing, {text}", own, "≤", 1_000, " ns")
    for name, rivals, goal in (("Netty", NETTY, 3), ("Kafka", (KAFKA,), 1), ("JDK", (JDK,), 1)):
        yield Target(f"firing, {text}, ratio to {name}", ratio(own, best(rivals, key)), "≤", goal)


TARGETS = (
    *_firing("on time", "ontime"),
    *_firing("backlog", "backlog"),
    Target(
        "pair, delays vary, ratio to Netty",
        ratio(of(HIERARCHICAL, VARIED), best(NETTY, VARIED)), "≤", 1.5,
    ),
    Target(
        "pair, delays vary, `HashedWheel` with 65,536 slots, ratio to `HierarchicalWheel`",
        ratio(of(HASHED, VARIED), of(HIERARCHICAL, VARIED)), "≤", 1.3,
    ),
    Target(
        f"pair with {MOST:,} pending, ratio to {FEW:,}",
        ratio(of(HIERARCHICAL, f"pair {MOST}"), of(HIERARCHICAL, PAIR)), "≤", 1.3,
    ),
    Target(
        f"pair, delays vary, with {MOST:,} pending, ratio to {FEW:,}",
        ratio(of(HIERARCHICAL, f"varied {MOST}"), of(HIERARCHICAL, VARIED)), "≤", 1.3,
    ),
    Target("memory of a pending timeout", of(HIERARCHICAL, "bytes"), "≤", 80, " bytes"),
    Target("longest single call while all are canceled", _longest_ms, "≤", 1, " ms"),
    Target("wake-ups while nothing is due", of(HIERARCHICAL, "wakeups/s"), "≤", 0, "/s"),
    Target(
        "pair, times faster than asyncio", ratio(of(ASYNCIO, PAIR), of(HIERARCHICAL, PAIR)), "≥", 10
    ),
    Target(
        "pure Python: pair, times faster than asyncio",
        ratio(of(ASYNCIO, PAIR), of(PURE, PAIR)), "≥", 3,
    ),
)  # fmt: skip

TABLES: dict[str, dict[str, str]] = {
    "Start and cancel, ns": {
        f"pair, {FEW:,} pending": PAIR,
        "delays vary": VARIED,
        "× Netty": f"{VARIED} / Netty",
        "start": f"start {FEW}",
        "cancel": f"cancel {FEW}",
        f"pair, {MANY:,} pending": f"pair {MANY}",
        "delays vary ": f"varied {MANY}",
        f"pair, {MOST:,} pending": f"pair {MOST}",
        "delays vary  ": f"varied {MOST}",
    },
    "Firing, ns": {
        "on time": "ontime",
        "× Netty": "ontime / Netty",
        "backlog": "backlog",
        "× Netty ": "backlog / Netty",
        "lateness p50, µs": "p50_us",
        "p99, µs": "p99_us",
        "least, µs": "least_us",
    },
    f"{MILLION:,} pending": {
        "bytes each": "bytes",
        "gc.collect(), ms": "gc ms",
        "idle wake-ups/s": "wakeups/s",
        "idle CPU, ms/s": "idle ms/s",
    },
    "Longest call, and four threads at once": {
        "longest cancel, µs": "cancel_us",
        "start, µs": "start_us",
        "advance, µs": "advance_us",
        "four threads: pairs/s": "pairs/s",
    },
}
"""Columns of each table, and their figures."""


def page(
    results: Results,
    scale: Scale,
    *,
    origin: Origin,
) -> str:
    """The page, as Markdown."""
    busy = [figures["wall/cpu"] for figures in results.values() if "wall/cpu" in figures]
    remark = (
        f"; in the median, pairs took {median(busy):.2f} times their CPU time in wall time (1.0: "
        "no other program ran)."
        if busy
        else ""
    )
    parts = origin.parts("Timer: cost in CPU time beside other timers", remark)
    verdicts = [target.verdict(results) for target in TARGETS]
    parts += [
        "## Targets",
        "Of `HierarchicalWheel`, the default queue, compiled, on `WheelTimer`:",
        table(("what", "measured", "target", ""), verdicts),
    ]
    for title, columns in TABLES.items():
        if shown := _table(results, columns):
            parts += [f"## {title}", shown]
    notes = NOTES.format(
        burst=scale.burst_ns / 1e6,
        fired=scale.fired,
        last=1 + scale.fired / 100_000,
        stall=scale.stall,
        late=scale.late,
    )
    return "\n\n".join([*parts, notes])


def _table(results: Results, columns: Mapping[str, str]) -> str:
    """A line for each subject; without lines and columns that have no figures."""
    lines = [(name, [_value(results, name, key) for key in columns.values()]) for name in results]
    lines = [(name, values) for name, values in lines if any(each is not None for each in values)]
    used = [any(values[i] is not None for _, values in lines) for i in range(len(columns))]
    shown = [
        (name, *(figure(value) for value, show in zip(values, used, strict=True) if show))
        for name, values in lines
    ]
    headers = [header.strip() for header, show in zip(columns, used, strict=True) if show]
    return table(("", *headers), shown) if shown else ""


def _value(results: Results, name: str, key: str) -> float | None:
    key, _, other = key.partition(" / ")
    found = of(name, key)
    return (ratio(found, best(NETTY, key)) if other else found)(results)
