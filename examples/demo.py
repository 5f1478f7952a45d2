"""Failback delivers every call, even if processes are killed; run it: python examples/demo.py.

The server runs in a second process (demo_server.py). The demo

1. calls the server while it is up,
2. kills it with SIGKILL, and goes on calling: each caller gets a default at once, and failback
   queues the call,
3. starts the server again on its port: failback delivers the queue,
4. kills it while two calls are in flight, one of which the server has recorded,
5. starts it again: failback delivers the queue,
6. kills it, and starts a client whose queue is in a journal (demo_client.py); while the client
   makes calls, the demo kills it with SIGKILL too,
7. starts the server and another client with this journal, which delivers the queue of the first.

Then it compares the calls with those that the servers have recorded, prints 14 checks, and ends
with status 0 if all of them passed. Failback delivers at least once: a call that was recorded and
not answered arrives twice. With a journal it then has the same idempotency key.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

# grpcio before 1.80 notices only every 5 s that a server is back (grpc #38290), or as often as this
# variable says when grpc is imported.
os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "100")

import grpc
import tenacity
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditStub
from demo_client import ClientProcess
from demo_process import DemoError
from demo_server import HOST, Received, ServerProcess
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from rpcwheel import RpcWheelError, with_failback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ANSWER_LIMIT_S = 1.0
"""How long a caller may wait while the server is down."""

DRAIN_LIMIT_S = 20.0
"""How long the queue may need after a restart."""

HOLD_LIMIT_S = 5.0
"""How long a call may need to the server that holds it, and for its answer after the kill."""

LEASE_S = 2
"""How long the calls that a killed client was about to repeat are reserved for it."""

TIMEOUT_S = 5.0
"""The timeout of each attempt. A killed server on this host refuses at once."""

PAUSE_S = 0.02

CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),  # the default is two minutes
    ("grpc.enable_retries", 0),
]

BACKOFF = tenacity.wait_exponential(multiplier=0.1, max=0.4) + tenacity.wait_random(0, 0.1)
"""0.1, 0.2, 0.4, 0.4, ... seconds between the attempts of a queued call, and some jitter."""

When = Literal["up", "down", "in flight"]


@dataclass
class Call:
    """One call, as its caller sees it."""

    number: int
    when: When
    """The state of the server: up, down, or killed during the call."""
    request: bytes
    """The message, serialized before the call."""
    changed: bytes
    """The message, serialized after the caller has changed it, as one who reuses it does."""
    result: Literal["response", "queued", "error"]
    began: float
    ended: float
    error: str = ""


@dataclass
class Outage:
    """One time without a server."""

    exit_status: int
    refused: bool
    """Whether the port refused a connection."""
    sizes: list[int] = field(default_factory=list)
    """The length of the queue after each call."""
    left: int = -1
    """The length of the queue after the restart; 0: all delivered, -1: not reached."""
    drained_s: float = 0.0


@dataclass
class Takeover:
    """The client that is killed, and the one that delivers its queue."""

    exit_status: int
    answered: list[str]
    """How it printed each answer that a caller got: `NUMBER REQUEST`."""
    delivered: int = -1
    """How many calls the next client has delivered; -1: not reached."""

    def requests(self) -> dict[bytes, int]:
        """Return the number of each order."""
        pairs = (line.split() for line in self.answered)
        return {bytes.fromhex(request): int(number) for number, request in pairs}


class Check(NamedTuple):
    """A claim, and whether it holds."""

    claim: str
    observed: str
    passed: bool


class Demo:
    """The steps of the demo, and what it observes.

    Args:
        orders: How many calls to make.
        outage_s: How long each of the two outages lasts, without the start of the server.
        directory: For the files of the servers.
        console: Where the steps are printed.
    """

    def __init__(self, orders: int, outage_s: float, directory: Path, console: Console) -> None:
        self.orders = orders
        self.calls: list[Call] = []
        self.outages: list[Outage] = []
        self.servers: list[ServerProcess] = []
        self.takeover: Takeover | None = None
        self.problems: list[str] = []
        self.delivered = self.queued = self.attempts = 0
        self._outage_s = outage_s
        self._directory = directory
        self._console = console
        self._numbers = itertools.count(1)

    def run(self) -> None:
        """Run all steps; if one fails, those after it do not run."""
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(self._start())
            target = f"{HOST}:{server.port}"
            channel = stack.enter_context(grpc.insecure_channel(target, options=CHANNEL_OPTIONS))
            stub = AuditStub(channel)

            @with_failback(
                retry_on=grpc.StatusCode.UNAVAILABLE,
                max_attempts=None,
                backoff=BACKOFF,
                default=None,
                max_pending=self.orders,
            )
            def push(line: Line) -> Receipt:
                return stub.Push(line, timeout=TIMEOUT_S)

            self._push = push
            stack.callback(push.failback.close, drain_timeout=0.0)
            stack.callback(self._read_stats)

            self._call_while_up(self.orders // 5)
            outage = self._kill(server, "between two calls")
            self._call_while_down(self.orders * 2 // 5, outage)

            count = self.orders // 10
            missed = len(self.calls) + count + 1
            holds = f"--hold-before={missed}", f"--hold-after={missed + 1}"
            server = stack.enter_context(self._start(server.port, *holds))
            self._drain(outage)
            self._call_while_up(count)

            outage = self._kill_during_calls(server)
            self._call_while_down(self.orders - len(self.calls), outage)
            server = stack.enter_context(self._start(server.port))
            self._drain(outage)

            self._kill(server, "after the last call")
            self._take_over(server.port)

    def _start(self, port: int = 0, *arguments: str) -> ServerProcess:
        directory = self._directory / f"server-{len(self.servers) + 1}"
        server = ServerProcess(directory, port, *arguments)
        self.servers.append(server)
        again = " again" if port else ""
        self._say(f"Server started{again}: process {server.pid}, {HOST}:{server.port}.")
        return server

    def _call(self, when: When) -> Call:
        number = next(self._numbers)
        line = Line(text=f"order {number} \N{EURO SIGN} \N{ROCKET} {os.urandom(32).hex()}")
        request, error = line.SerializeToString(), ""
        result: Literal["response", "queued", "error"]
        began = time.monotonic()
        try:
            result = "queued" if self._push(line) is None else "response"
        except (grpc.RpcError, RpcWheelError) as failure:
            result, error = "error", f"order {number}: {failure}"
        ended = time.monotonic()
        line.text = "changed by the caller after the call"
        return Call(number, when, request, line.SerializeToString(), result, began, ended, error)

    def _call_while_up(self, count: int) -> None:
        for _ in range(count):
            self.calls.append(self._call("up"))
            time.sleep(PAUSE_S)
        responses = sum(call.result == "response" for call in self.calls[-count:])
        self._say(f"{count} calls: {responses} answered by the server.")

    def _kill(self, server: ServerProcess, moment: str) -> Outage:
        outage = Outage(server.kill(), server.refuses_connections())
        self.outages.append(outage)
        port = "refuses connections" if outage.refused else "still accepts connections"
        self._say(f"SIGKILL {moment}: exit status {outage.exit_status}, the port {port}.")
        return outage

    def _kill_during_calls(self, server: ServerProcess) -> Outage:
        with ThreadPoolExecutor(2) as pool, server:  # the server ends first, and so do its calls
            flights = [pool.submit(self._call, "in flight")]
            server.wait_for("holding", HOLD_LIMIT_S)
            flights.append(pool.submit(self._call, "in flight"))
            server.wait_for("holding", HOLD_LIMIT_S)
            killed_at = time.monotonic()
            outage = self._kill(server, "while two calls are in flight")
            calls = [flight.result(HOLD_LIMIT_S) for flight in flights]
        for call in calls:
            call.began = killed_at
        self.calls += calls
        slowest = max(call.ended - killed_at for call in calls)
        self._say(f"Their callers got the default {slowest * 1e3:.1f} ms after the kill.")
        return outage

    def _call_while_down(self, count: int, outage: Outage) -> None:
        began, before = time.monotonic(), self._push.failback.pending
        with self._queue_bar(before + count) as show:
            for number in range(1, count + 1):
                self.calls.append(self._call("down"))
                outage.sizes.append(self._push.failback.pending)
                show(outage.sizes[-1])
                next_at = began + self._outage_s * number / count
                time.sleep(max(0.0, next_at - time.monotonic()))
        slowest = max(call.ended - call.began for call in self.calls[-count:])
        self._say(
            f"{count} calls without a server: the slowest was answered in {slowest * 1e3:.1f} ms; "
            f"{self._push.failback.pending} calls are queued. Their callers have changed the "
            "messages since."
        )

    def _drain(self, outage: Outage) -> None:
        began, failback = time.monotonic(), self._push.failback
        with self._queue_bar(outage.sizes[-1]) as show:
            while failback.pending and time.monotonic() < began + DRAIN_LIMIT_S:
                show(failback.pending)
                time.sleep(PAUSE_S)
        outage.left, outage.drained_s = failback.pending, time.monotonic() - began
        if outage.left:
            raise DemoError(f"{outage.left} calls are queued {DRAIN_LIMIT_S:g} s after the restart")
        self._say(f"The queue is empty after {outage.drained_s:.2f} s.")

    def _take_over(self, port: int) -> None:
        journal = f"sqlite://{self._directory}/failback.db?lease={LEASE_S}"
        first, count = self.orders + 1, max(5, self.orders // 3)
        with self._start_client(journal, port, f"--first={first}") as client:
            answered = [client.wait_for("queued", HOLD_LIMIT_S) for _ in range(count)]
            self.takeover = takeover = Takeover(client.kill(), answered)
            answered += client.rest("queued")
        self._say(
            f"SIGKILL of the client, which makes calls: exit status {takeover.exit_status}. "
            f'{len(answered)} calls were answered "queued".'
        )
        with (
            self._start(port, f"--hold-after={first}"),
            self._start_client(journal, port) as client,
        ):
            began = time.monotonic()
            takeover.delivered = int(client.wait_for("delivered", DRAIN_LIMIT_S))
            took_s = time.monotonic() - began
        self._say(f"This client has delivered {takeover.delivered} calls in {took_s:.2f} s.")

    def _start_client(self, journal: str, port: int, *arguments: str) -> ClientProcess:
        log = self._directory / f"client{'-1' if arguments else '-2'}.log"
        client = ClientProcess(journal, f"{HOST}:{port}", log, *arguments)
        task = "It makes calls." if arguments else "It only delivers what the journal has."
        self._say(f"Client with a journal started: process {client.pid}. {task}")
        return client

    def _read_stats(self) -> None:
        stats = self._push.failback.stats()
        self.queued, self.delivered, self.attempts = (
            stats.queued_total,
            stats.redelivered,
            stats.attempts,
        )

    def _say(self, sentence: str) -> None:
        style = "red" if "SIGKILL" in sentence else ""
        self._console.print(Text(f"- {sentence}", style=style))

    @contextlib.contextmanager
    def _queue_bar(self, room: int) -> Iterator[Callable[[int], object]]:
        columns = TextColumn("  queue"), BarColumn(30), TextColumn("{task.completed} calls")
        with Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        ) as progress:
            task = progress.add_task("queue", total=room)
            yield lambda size: progress.update(task, completed=size)


def checks(demo: Demo) -> Iterator[Check]:
    """Compare the calls with what arrived. A check of a step that did not run fails."""
    calls, outages = demo.calls, demo.outages
    received = [one for server in demo.servers for one in server.received()]
    arrived = [request for request, key in received if not key]  # of the queue in memory
    count, sent = Counter(arrived), {call.request for call in calls}
    results = Counter(call.result for call in calls)

    exits = listed({outage.exit_status for outage in outages})
    refused = listed({"refused" if outage.refused else "open" for outage in outages})
    killed = [(outage.exit_status, outage.refused) for outage in outages]
    yield Check(
        "server killed 3 times",
        f"{len(outages)} times: exit {exits}, port {refused}",
        killed == [(-signal.SIGKILL, True)] * 3,
    )
    yield answered("callers answered", "down", calls)
    yield answered("those in flight", "in flight", calls)

    errors = [call.error for call in calls if call.error]
    yield Check(
        "no caller saw an error",
        f"{results['response']} responses, {results['queued']} defaults, "
        f"{len(errors)} errors{''.join(f', the first: {error}' for error in errors[:1])}",
        len(calls) == demo.orders and not errors and results["response"] > 0,
    )
    peaks = [outage.sizes[-1] for outage in outages if outage.sizes]
    steps = [b - a for outage in outages for a, b in itertools.pairwise(outage.sizes)]
    yield Check(
        "queue grew by one with each",
        f"to {listed(peaks)}; {results['queued']} calls",
        len(peaks) == 2 and set(steps) == {1} and sum(peaks) == results["queued"],  # noqa: PLR2004
    )
    drained = [outage for outage in outages if outage.left == 0]
    yield Check(
        "queue drained to 0, twice",
        f"in {listed(f'{outage.drained_s:.2f}' for outage in drained)} s",
        len(drained) == 2,  # noqa: PLR2004
    )
    yield Check(
        "failback counts the same",
        f"{demo.delivered} of {demo.queued} delivered, {demo.attempts} attempts",
        demo.delivered == demo.queued == results["queued"] > 0,
    )
    yield Check(
        "every call arrived",
        f"{len(sent & count.keys())} of {demo.orders}",
        len(sent) == demo.orders and sent <= count.keys(),
    )
    changed = sum(call.changed in count for call in calls)
    unchanged = sum(call.changed == call.request for call in calls)
    yield Check(
        "byte for byte, as when called",
        f"sha256 {digest(sent)}, {digest(count)}" + (f"; {changed} changed" if changed else ""),
        bool(sent) and sent == count.keys() and not unchanged,
    )
    twice = [call for call in calls if count[call.request] > 1]
    yield Check(
        "twice only if in flight",
        f"order {listed(call.number for call in twice)}, recorded but not answered"
        if twice
        else "none",
        bool(count)
        and all(call.when == "in flight" and count[call.request] == 2 for call in twice),  # noqa: PLR2004
    )
    yield from taken_over(demo.takeover, received)
    yield Check("no other problem", "; ".join(demo.problems) or "none", passed=not demo.problems)


def taken_over(takeover: Takeover | None, received: list[Received]) -> Iterator[Check]:
    """Check that the calls of the killed client arrived, repeated ones with the same key."""
    queued = {} if takeover is None else takeover.requests()
    yield Check(
        "client killed in its calls",
        "not reached"
        if takeover is None
        else f'exit {takeover.exit_status}, {len(queued)} calls answered "queued"',
        takeover is not None and takeover.exit_status == -signal.SIGKILL and bool(queued),
    )
    keys: dict[bytes, list[str]] = {}
    for request, key in received:
        if key:
            keys.setdefault(request, []).append(key)
    yield Check(
        "the next delivered its queue",
        f"{len(queued.keys() & keys.keys())} of {len(queued)} arrived",
        bool(queued) and queued.keys() <= keys.keys(),
    )
    twice = {request: used for request, used in keys.items() if len(used) > 1}
    unequal = sum(len(set(used)) > 1 for used in twice.values())
    distinct = {key for used in keys.values() for key in used}
    yield Check(
        "twice with the same key",
        f"order {listed(queued.get(request, '?') for request in twice)}; different keys: {unequal}"
        if twice
        else "none arrived twice",
        bool(twice) and not unequal and len(distinct) == len(keys),
    )


def answered(claim: str, when: When, calls: list[Call]) -> Check:
    """Check that each caller got the default within the limit."""
    claim = f"{claim} within {ANSWER_LIMIT_S * 1e3:.0f} ms"
    times = [call.ended - call.began for call in calls if call.when == when]
    queued = sum(call.result == "queued" for call in calls if call.when == when)
    if not times:
        return Check(claim, "no such call", passed=False)
    median, slowest = statistics.median(times) * 1e3, max(times) * 1e3
    return Check(
        claim,
        f"{queued} of {len(times)}, median {median:.1f}, slowest {slowest:.1f} ms",
        queued == len(times) and slowest <= ANSWER_LIMIT_S * 1e3,
    )


def digest(requests: Iterable[bytes]) -> str:
    """Return a short hash of a set of requests."""
    return hashlib.sha256(b"\n".join(sorted(set(requests)))).hexdigest()[:12]


def listed(values: Iterable[object]) -> str:
    """Return "1, 2 and 3"."""
    *others, last = [str(value) for value in values] or ["none"]
    return f"{', '.join(others)} and {last}" if others else last


class Errors(logging.Handler):
    """Collects what rpcwheel logs as an error."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a message."""
        self._problems.append(record.getMessage())


def main() -> int:
    """Run the demo, and return 0 if every check passed."""
    parser = argparse.ArgumentParser(description="Kill a gRPC server and a client under calls.")
    parser.add_argument("--orders", type=int, default=60, help="calls to make, at least 10 (60)")
    parser.add_argument("--outage", type=float, default=1.5, help="seconds of each outage (1.5)")
    args = parser.parse_args()
    if args.orders < 10 or not 0 < args.outage < float("inf"):  # noqa: PLR2004
        parser.error("give at least 10 orders, and an outage above 0 s")
    for number in (signal.SIGINT, signal.SIGTERM):  # so that its processes end too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="rpcwheel-demo-") as directory:
        demo = Demo(args.orders, args.outage, Path(directory), console)
        log = logging.getLogger("rpcwheel")
        log.propagate = False
        log.addHandler(Errors(demo.problems))
        try:
            demo.run()
        except DemoError as error:
            demo.problems.append(str(error))
        found = list(checks(demo))
    table = Table("", "claim", "observed", box=SIMPLE_HEAD)
    for check in found:
        style = "green" if check.passed else "bold red"
        table.add_row(
            Text("ok" if check.passed else "FAIL", style=style), check.claim, check.observed
        )
    console.print(table)
    failed = [check.claim for check in found if not check.passed]
    if failed:
        console.print(f"FAILED, {len(failed)} of {len(found)} checks: {'; '.join(failed)}.")
    else:
        console.print(f"All {len(found)} checks passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
