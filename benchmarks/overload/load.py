"""The load of a case: `python -m benchmarks.overload.load SPEC`, with a `LoadSpec` in JSON.

Prints null when it has connected. Then it obeys lines of JSON on its input, and answers each with a
line:

* `["closed", callers, seconds]`: the calls a second that are answered if so many callers make one
  call after the other.
* `["open", begins, [[criticality, [[rate, seconds], ...]], ...]]`: flows of calls, each at these
  rates one after the other, from that time on. The answer has how late calls were sent (99th
  percentile), and of each call when it was due, how long it took after it was sent, its status code
  and its criticality.

The thread that sends waits for nothing but the time when the next call is due. When a call ends,
the thread of its channel appends it to a list.
"""

from __future__ import annotations

import gc
import heapq
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import grpc

import rpcwheel
from benchmarks._process import obey
from benchmarks.overload.cases import CRITICAL, DEADLINE_S, KIT, METHOD, NAIVE, SHEDDABLE
from rpcwheel import MethodPolicy, RetryPolicy
from rpcwheel.rpc import CRITICALITY_KEY

CONNECTIONS = 4
NAIVE_ATTEMPTS = 3
RETRY = RetryPolicy(retry_on={"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
PATIENCE_S = 10.0
"""How long after the last call its end is awaited."""

Done = Callable[[str], None]
Flow = tuple[str | None, Sequence[tuple[float, float]]]
"""The criticality of its calls, and its rates, each for so many seconds."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The arguments of the process that sends the calls."""

    ports: list[int]  # of the server; or of that for CRITICAL and that for SHEDDABLE calls
    client: str
    has_criticality: bool = False
    poisson: bool = False


class Client:
    """Makes calls on several connections in turn, and calls back when each ends."""

    def __init__(self, spec: LoadSpec) -> None:
        levels = (CRITICAL, SHEDDABLE) if spec.has_criticality else (None,)
        self._begin = {
            level: cycle(
                [_method(_connected(port), spec.client, level) for _ in range(CONNECTIONS)]
            )
            for level, port in zip(levels, cycle(spec.ports), strict=False)
        }
        self._attempts = NAIVE_ATTEMPTS if spec.client == NAIVE else 1

    def send(self, criticality: str | None, done: Done) -> None:
        """Begin a call; `done` gets its status code."""
        self._attempt(next(self._begin[criticality]), self._attempts, done)

    def _attempt(self, begin: Callable[[], Any], left: int, done: Done) -> None:
        def ended(call: Any) -> None:
            code = call.code()
            if code is grpc.StatusCode.OK or left == 1:
                done(code.name)
            else:
                self._attempt(begin, left - 1, done)

        begin().add_done_callback(ended)


def _connected(port: int) -> Any:
    """A channel with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
    grpc.channel_ready_future(channel).result(PATIENCE_S)
    return channel


def _method(channel: Any, client: str, criticality: str | None) -> Callable[[], Any]:
    """The function that begins a call."""
    metadata = None if criticality is None else ((CRITICALITY_KEY, criticality),)
    if client == KIT:
        settings: dict[str, Any] = {} if criticality is None else {"criticality": criticality}
        methods = {METHOD: MethodPolicy(idempotent=True, **settings)}
        channel = rpcwheel.Kit(retry=RETRY, methods=methods).intercept_channel(channel)
        metadata = None
    method = channel.unary_unary(METHOD)
    return partial(method.future, b"", timeout=DEADLINE_S, metadata=metadata)


def closed(client: Client, callers: int, seconds: float) -> float:
    """The calls a second that are answered, after a start of a fifth of the time."""
    begins_s = time.monotonic() + seconds / 5
    ends_s, answered, idle = begins_s + seconds, [], threading.Semaphore(0)

    def done(code: str) -> None:
        now_s = time.monotonic()
        if code == "OK" and begins_s <= now_s < ends_s:
            answered.append(now_s)
        if now_s < ends_s:
            client.send(None, done)
        else:
            idle.release()

    for _ in range(callers):
        client.send(None, done)
    for _ in range(callers):
        idle.acquire()
    return len(answered) / seconds


def open_loop(
    send: Callable[[Any, Done], object], begins_s: float, due: Sequence[tuple[float, Any]]
) -> dict[str, Any]:
    """Send calls, of a criticality or a method, when they are due, and wait for their ends."""
    calls: list[tuple[float, float, str, Any]] = []
    late_s = []

    def begin(after_s: float, which: Any) -> None:
        sent_s = time.monotonic()

        def done(code: str) -> None:
            calls.append((after_s, time.monotonic() - sent_s, code, which))

        send(which, done)

    for after_s, which in due:
        while (left_s := begins_s + after_s - time.monotonic()) > 0.0:
            time.sleep(left_s)
        late_s.append(-left_s)
        begin(after_s, which)
    gives_up_s = time.monotonic() + PATIENCE_S
    while len(calls) < len(due) and time.monotonic() < gives_up_s:
        time.sleep(0.01)
    late_s.sort()
    return {"late_s": late_s[int(0.99 * len(late_s))], "calls": calls[:]}


def due_times(flow: Flow, gaps: random.Random | None) -> Iterator[tuple[float, str | None]]:
    """When the calls of a flow are due, after the beginning; at even or at random times."""
    criticality, rates = flow
    begins_s = 0.0
    for rate, seconds in rates:
        due_s = begins_s
        begins_s += seconds
        while rate and due_s < begins_s:
            yield due_s, criticality
            due_s += gaps.expovariate(rate) if gaps else 1.0 / rate


def main(spec: LoadSpec) -> None:
    """Connect, and obey the lines of the input."""
    sys.setswitchinterval(0.0005)  # the thread that sends gets the lock soon after it wakes up
    client = Client(spec)
    gc.freeze()

    def answer(question: Any) -> object:
        match question:
            case ["closed", callers, seconds]:
                return closed(client, callers, seconds)
            case ["open", begins_s, flows]:
                gaps = random.Random(1) if spec.poisson else None
                due = list(heapq.merge(*(due_times(flow, gaps) for flow in flows), key=_due_s))
                return open_loop(client.send, begins_s, due)
        raise ValueError(f"closed or open, not {question}")

    obey(None, answer)


def _due_s(call: tuple[float, str | None]) -> float:
    return call[0]


if __name__ == "__main__":
    main(LoadSpec(**json.loads(sys.argv[1])))
