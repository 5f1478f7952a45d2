"""The load of a case: `python -m benchmarks.overload.load SPEC`, with a spec in JSON.

Prints a line when it has connected. Then it obeys lines of JSON on its input, and answers each with
a line:

* `["closed", callers, seconds]`: the calls a second of so many callers, each of which makes one
  call after the other.
* `["open", begins, [[rate, seconds], ...]]`: calls at these rates, one after the other, from that
  time on. The answer has how late calls were sent (99th percentile), and of each call when it was
  sent, how long it took, and its status code.

The threads of the channels only append to lists, and the thread that sends waits for nothing but
the time when the next call is due.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

import rpcwheel
from benchmarks.overload.cases import DEADLINE_S, KIT, METHOD, NAIVE
from rpcwheel import MethodPolicy, RetryPolicy

CONNECTIONS = 4
NAIVE_ATTEMPTS = 3
PATIENCE_S = 10.0
"""How long after the last call its end is awaited."""

POLICIES: dict[str, Any] = {
    "retry": RetryPolicy(retry_on={"UNAVAILABLE", "RESOURCE_EXHAUSTED"}),
    "methods": {METHOD: MethodPolicy(idempotent=True)},
}
"""The settings of the client with a kit."""

Done = Callable[[str], None]
Send = Callable[[Done], None]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What the process of the load is told."""

    port: int
    client: str
    poisson: bool


class Client:
    """Makes calls on several connections in turn, and is called back when each ends."""

    def __init__(self, spec: LoadSpec) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels: list[Any] = [
            grpc.insecure_channel(f"127.0.0.1:{spec.port}", options) for _ in range(CONNECTIONS)
        ]
        for channel in channels:
            grpc.channel_ready_future(channel).result(PATIENCE_S)
        if spec.client == KIT:
            kit = rpcwheel.Kit(**POLICIES)
            channels = [kit.intercept_channel(channel) for channel in channels]
        self._methods = itertools.cycle([channel.unary_unary(METHOD) for channel in channels])
        self._attempts = NAIVE_ATTEMPTS if spec.client == NAIVE else 1

    def send(self, done: Done) -> None:
        """Begin a call; `done` gets its status code."""
        self._attempt(next(self._methods), self._attempts, done)

    def _attempt(self, method: Any, left: int, done: Done) -> None:
        call = method.future(b"", timeout=DEADLINE_S)

        def ended(call: Any) -> None:
            code = call.code()
            if code is grpc.StatusCode.OK or left == 1:
                done(code.name)
            else:
                self._attempt(method, left - 1, done)

        call.add_done_callback(ended)


def closed(send: Send, callers: int, seconds: float) -> float:
    """The calls a second that are answered, after a start of a fifth of the time."""
    begins_s = time.monotonic() + seconds / 5
    ends_s, answered, idle = begins_s + seconds, [], threading.Semaphore(0)

    def done(code: str) -> None:
        now_s = time.monotonic()
        if code == "OK" and begins_s <= now_s < ends_s:
            answered.append(now_s)
        if now_s < ends_s:
            send(done)
        else:
            idle.release()

    for _ in range(callers):
        send(done)
    for _ in range(callers):
        idle.acquire()
    return len(answered) / seconds


def due_times(rates: Sequence[tuple[float, float]], *, poisson: bool) -> Iterator[float]:
    """When each call is due, in seconds after the beginning."""
    gaps, begins_s = random.Random(1), 0.0
    for rate, seconds in rates:
        due_s = begins_s
        begins_s += seconds
        while rate and due_s < begins_s:
            yield due_s
            due_s += gaps.expovariate(rate) if poisson else 1.0 / rate


def open_loop(send: Send, begins_s: float, due: Sequence[float]) -> dict[str, Any]:
    """Send calls when they are due, and wait until they have ended."""
    calls: list[tuple[float, float, str]] = []
    late_s = []
    for each in due:
        due_s = begins_s + each
        while (left_s := due_s - time.monotonic()) > 0.0:
            time.sleep(left_s)
        late_s.append(-left_s)
        _send(send, begins_s, calls)
    patience_ends_s = time.monotonic() + PATIENCE_S
    while len(calls) < len(due) and time.monotonic() < patience_ends_s:
        time.sleep(0.01)
    late_s.sort()
    return {"late_s": late_s[int(0.99 * len(late_s))], "calls": calls[:]}


def _send(send: Send, begins_s: float, calls: list[tuple[float, float, str]]) -> None:
    sent_s = time.monotonic()

    def done(code: str) -> None:
        calls.append((sent_s - begins_s, time.monotonic() - sent_s, code))

    send(done)


def main(spec: LoadSpec) -> None:
    """Connect, and obey the lines of the input."""
    sys.setswitchinterval(0.0005)  # the thread that sends gets the lock soon after it wakes up
    client = Client(spec)
    gc.freeze()
    print("null", flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case ["closed", callers, seconds]:
                answer: object = closed(client.send, callers, seconds)
            case ["open", begins_s, rates]:
                due = list(due_times(rates, poisson=spec.poisson))
                answer = open_loop(client.send, begins_s, due)
            case unknown:
                raise ValueError(f"closed or open, not {unknown}")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(LoadSpec(**json.loads(sys.argv[1])))
