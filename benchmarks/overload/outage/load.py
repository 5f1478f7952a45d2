"""A client and its load: `python -m benchmarks.overload.outage.load SPEC`.

SPEC is a `LoadSpec` in JSON. Prints null when it has connected. Then it obeys lines of JSON on its
input: `[begins, rate, seconds, methods]` makes calls at this rate from that time on, of each of
these methods in turn. The answer is that of `benchmarks.overload.load`, with the number of the
method in place of the criticality, and with the times and the methods of all attempts.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

import rpcwheel
import rpcwheel.aio
from benchmarks._process import obey
from benchmarks.overload.cases import (
    BOTH,
    BREAKER,
    NAIVE,
    PLAIN,
    RETRY,
    THROTTLE,
    World,
)
from benchmarks.overload.load import NAIVE_ATTEMPTS, Done, due_times, open_loop
from benchmarks.overload.outage.server import METHODS, SENT_KEY
from rpcwheel import RetryPolicy
from rpcwheel.admission import BreakerPolicy
from rpcwheel.options import channel_options

NAIVE_BACKOFF_S = 0.05
OPTIONS = channel_options(preset="lan")
PATIENCE_S = 10.0

_THROTTLE: dict[str, Any] = {"throttle": 2.0}
_BREAKER: dict[str, Any] = {"breaker": BreakerPolicy()}
SETTINGS: dict[str, dict[str, Any]] = {
    RETRY: {},
    THROTTLE: _THROTTLE,
    BREAKER: _BREAKER,
    BOTH: _THROTTLE | _BREAKER,
}
"""The settings of the kits, beside those of retries."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The arguments of the process of a client."""

    world: World
    port: int
    client: str
    deadline_s: float

    @property
    def target(self) -> str:
        """The server."""
        return f"127.0.0.1:{self.port}"

    @property
    def most_attempts(self) -> int:
        """How many attempts of a call are made, other than by a kit."""
        return NAIVE_ATTEMPTS if self.client == NAIVE else 1

    def intercepted(self, channel: Any, kits: Any) -> Any:
        """The channel of `grpc` or `grpc.aio`, or a kit's in front of it."""
        if self.client in (PLAIN, NAIVE):
            return channel
        retry = RetryPolicy(retry_on={"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
        kit = kits.Kit(retry=retry, idempotent=True, **SETTINGS[self.client])
        return kit.intercept_channel(channel)


class Attempts:
    """Notes when each attempt is sent, and sends the time as metadata."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, str]] = []

    def noted(self, details: Any) -> Any:
        """The details of an attempt that is sent now."""
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        if method not in METHODS:  # a health check
            return details
        now_s = time.monotonic()
        self.sent.append((now_s, method))
        metadata = (*(details.metadata or ()), (SENT_KEY, f"{now_s:.6f}"))
        return details._replace(metadata=metadata)


class SyncAttempts(Attempts, grpc.UnaryUnaryClientInterceptor):
    """Of `grpc`."""

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        return continuation(self.noted(details), request)


class AioAttempts(Attempts, grpc.aio.UnaryUnaryClientInterceptor):
    """Of `grpc.aio`."""

    async def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Awaitable[Any]], details: Any, request: Any
    ) -> Any:
        return await continuation(self.noted(details), request)


class SyncClient:
    """Makes calls with `grpc`."""

    def __init__(self, spec: LoadSpec) -> None:
        self._most_attempts, self._deadline_s = spec.most_attempts, spec.deadline_s
        self.attempts = SyncAttempts()
        channel = grpc.insecure_channel(spec.target, OPTIONS)
        channel = spec.intercepted(grpc.intercept_channel(channel, self.attempts), rpcwheel)
        self._methods = [channel.unary_unary(method) for method in METHODS]
        self._methods[0](b"", timeout=PATIENCE_S, wait_for_ready=True)

    def send(self, number: int, done: Done) -> None:
        """Begin a call of a method; `done` gets its status code."""
        self._attempt(number, self._most_attempts, done)

    def _attempt(self, number: int, left: int, done: Done) -> None:
        def ended(call: Any) -> None:
            code = call.code()
            if code is grpc.StatusCode.OK or left == 1:
                done(code.name)
            else:
                again = (number, left - 1, done)
                threading.Timer(NAIVE_BACKOFF_S, self._attempt, again).start()

        call = self._methods[number].future(b"", timeout=self._deadline_s)
        call.add_done_callback(ended)


class AioClient:
    """Makes calls with `grpc.aio`, on a loop in a thread of its own."""

    def __init__(self, spec: LoadSpec) -> None:
        self._most_attempts, self._deadline_s = spec.most_attempts, spec.deadline_s
        self.attempts = AioAttempts()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        connect = self._connect(spec)
        self._methods = asyncio.run_coroutine_threadsafe(connect, self._loop).result(PATIENCE_S)

    async def _connect(self, spec: LoadSpec) -> list[Any]:
        interceptors = [self.attempts]
        channel = grpc.aio.insecure_channel(spec.target, OPTIONS, interceptors=interceptors)
        channel = spec.intercepted(channel, rpcwheel.aio)
        methods = [channel.unary_unary(method) for method in METHODS]
        await methods[0](b"", timeout=PATIENCE_S, wait_for_ready=True)
        return methods

    def send(self, number: int, done: Done) -> None:
        """Begin a call of a method; `done` gets its status code."""
        self._loop.call_soon_threadsafe(self._start, number, done)

    def _start(self, number: int, done: Done) -> None:
        task = self._loop.create_task(self._call(self._methods[number], done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, method: Any, done: Done) -> None:
        code = await self._attempt(method)
        for _ in range(1, self._most_attempts):
            if code == "OK":
                break
            await asyncio.sleep(NAIVE_BACKOFF_S)
            code = await self._attempt(method)
        done(code)

    async def _attempt(self, method: Any) -> str:
        try:
            await method(b"", timeout=self._deadline_s)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"


CLIENTS: dict[World, Callable[[LoadSpec], SyncClient | AioClient]] = {
    "sync": SyncClient,
    "aio": AioClient,
}


def main(spec: LoadSpec) -> None:
    """Connect, and obey the lines of the input."""
    sys.setswitchinterval(0.0005)  # the thread that sends gets the lock soon after it wakes up
    logging.getLogger("rpcwheel").setLevel(logging.ERROR)
    client = CLIENTS[spec.world](spec)
    gc.freeze()

    def answer(question: tuple[float, float, float, int]) -> object:
        begins_s, rate, seconds, methods = question
        times = due_times((None, [(rate, seconds)]), None)
        due = [(due_s, count % methods) for count, (due_s, _) in enumerate(times)]
        return open_loop(client.send, begins_s, due) | {"attempts": client.attempts.sent}

    obey(None, answer)


if __name__ == "__main__":
    main(LoadSpec(**json.loads(sys.argv[1])))
