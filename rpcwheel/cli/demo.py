"""The demo: calls through `@with_failback` while their server is killed, twice, and comes back.

The story, on a real server in a second process, a real channel and a real stub:

1. The server is up and answers.
2. SIGKILL between two calls. Callers go on, get the default at once, and the queue grows.
3. The server comes back on its port: the queue drains.
4. SIGKILL while two calls are in flight: the server had recorded one, not the other. More calls.
5. The server comes back: the queue drains.

The servers' journals say what arrived, `cli/checks.py` says whether that is what was promised.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rpcwheel.cli.caller import Caller
from rpcwheel.cli.checks import Answer, Call, Check, Observed, Outage, When, judge
from rpcwheel.cli.demo_server import HOST, read_journal
from rpcwheel.cli.server_process import DemoError, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.cli.view import View

__all__ = ["Demo", "Settings", "run"]

TITLE = "rpcwheel demo: calls through failback while their server dies and comes back"

HEARD_WITHIN = 5.0
"""Seconds for a call to reach the server that holds it, and to be answered after the kill."""

PAUSE = 0.02
"""Seconds between two calls while the server is up, and between two looks at a draining queue."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be set; times in seconds."""

    events: int = 60
    outage: float = 1.5  # how long each of the two outages lasts, the server's start not counted
    answer_within: float = 1.0  # the most that a caller may wait while there is no server
    drain_within: float = 20.0


class StartServer(Protocol):
    """How a server is started; `ServerProcess`, but for tests that want it to go wrong."""

    def __call__(
        self, directory: Path, *, port: int = 0, arguments: tuple[str, ...] = ()
    ) -> ServerProcess: ...


def run(settings: Settings, view: View, start_server: StartServer = ServerProcess) -> int:
    """Tell the story, show the table.

    Returns:
        0 if every check passed, else 1.
    """
    with view:
        view.title(TITLE)
        checks = Demo(settings, view, start_server).run()
        view.verdict(checks)
    return 0 if all(check.passed for check in checks) else 1


class Demo:
    """One telling of the story; used once.

    Args:
        settings: How many calls, how long.
        view: Where it is shown.
        start_server: Replaced by tests.
    """

    def __init__(
        self, settings: Settings, view: View, start_server: StartServer = ServerProcess
    ) -> None:
        self._settings = settings
        self._view = view
        self._start_server = start_server
        self._seen = Observed(events=settings.events, answer_within=settings.answer_within)
        self._servers: list[ServerProcess] = []
        self._last_event = 0

    def run(self) -> list[Check]:
        """Tell the story and judge it; no process or file is left, however it ends."""
        with (
            tempfile.TemporaryDirectory(prefix="rpcwheel-demo-") as directory,
            _errors_logged_into(self._seen.problems),
        ):
            try:
                self._story(Path(directory))
            except DemoError as error:
                self._seen.problems.append(str(error))
            self._read_journals()
        return judge(self._seen)

    def _story(self, directory: Path) -> None:
        events = self._settings.events
        up, down, up_again = events // 5, events * 2 // 5, events // 10
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(self._serve(directory))
            target = f"{HOST}:{server.port}"
            caller = stack.enter_context(Caller(target, max_pending=events))
            stack.callback(self._count, caller)
            self._calls_while_up(caller, up)
            outage = self._kill(server, "between two calls")
            self._calls_while_down(caller, down, outage)

            missed, recorded = up + down + up_again + 1, up + down + up_again + 2
            holds = ("--hold-before", str(missed), "--hold-after", str(recorded))
            server = stack.enter_context(self._serve(directory, port=server.port, arguments=holds))
            self._drain(caller, outage)
            self._calls_while_up(caller, up_again)

            outage = self._kill_in_flight(caller, server)
            self._calls_while_down(caller, events - self._last_event, outage)
            stack.enter_context(self._serve(directory, port=server.port))
            self._drain(caller, outage)

    def _serve(
        self, directory: Path, port: int = 0, arguments: tuple[str, ...] = ()
    ) -> ServerProcess:
        name = f"server-{len(self._servers) + 1}"
        server = self._start_server(directory / name, port=port, arguments=arguments)
        self._servers.append(server)
        self._view.say(
            f"Server started: process {server.pid}, {HOST}:{server.port}{' again' if port else ''}."
        )
        return server

    def _calls_while_up(self, caller: Caller, count: int) -> None:
        calls = []
        for event in self._next_events(count):
            calls.append(self._call(caller, event, When.UP))
            time.sleep(PAUSE)
        answered = sum(call.answer is Answer.SERVER for call in calls)
        self._view.say(f"{count} calls: {answered} answered by the server.")

    def _kill(self, server: ServerProcess, moment: str) -> Outage:
        outage = Outage(exit_status=server.kill())
        outage.port_refuses = server.refuses()
        self._seen.outages.append(outage)
        port = "refuses connections" if outage.port_refuses else "still accepts connections"
        self._view.say(f"SIGKILL {moment}: exit status {outage.exit_status}, port {port}.")
        return outage

    def _kill_in_flight(self, caller: Caller, server: ServerProcess) -> Outage:
        # On the way out the server dies first, which ends the calls that the pool would wait for.
        with ThreadPoolExecutor(2) as pool, server:
            flights = [
                pool.submit(caller.call, event, When.KILLED) for event in self._next_events(2)
            ]
            for _ in flights:
                server.hear("holding", HEARD_WITHIN)
            killed_at = time.monotonic()
            outage = self._kill(server, "while two calls are in flight")
            calls = [replace(flight.result(HEARD_WITHIN), began=killed_at) for flight in flights]
        self._seen.calls.extend(calls)
        slowest = max(call.ended - call.began for call in calls)
        self._view.say(f"Their callers had their answer {slowest * 1e3:.1f} ms after the kill.")
        return outage

    def _calls_while_down(self, caller: Caller, count: int, outage: Outage) -> None:
        began, in_flight, calls = time.monotonic(), caller.pending, []
        for number, event in enumerate(self._next_events(count), start=1):
            calls.append(self._call(caller, event, When.DOWN))
            outage.sizes.append(caller.pending)
            self._view.queue(outage.sizes[-1], in_flight + count, calls[-1].ended - calls[-1].began)
            time.sleep(max(0.0, began + self._settings.outage * number / count - time.monotonic()))
        slowest = max((call.ended - call.began for call in calls), default=0.0)
        self._view.say(
            f"{count} calls without a server: the slowest was answered in {slowest * 1e3:.1f} ms; "
            f"{caller.pending} calls wait in the queue. Their callers changed the requests since."
        )

    def _drain(self, caller: Caller, outage: Outage) -> None:
        began = time.monotonic()
        while caller.pending and time.monotonic() < began + self._settings.drain_within:
            self._view.queue(caller.pending, outage.sizes[-1])
            time.sleep(PAUSE)
        self._view.queue(caller.pending, outage.sizes[-1])
        outage.left, outage.drain_seconds = caller.pending, time.monotonic() - began
        if outage.left:
            raise DemoError(
                f"{outage.left} calls wait {self._settings.drain_within:g} s after the restart"
            )
        self._view.say(f"The queue is empty after {outage.drain_seconds:.2f} s.")

    def _call(self, caller: Caller, event: int, when: When) -> Call:
        call = caller.call(event, when)
        self._seen.calls.append(call)
        return call

    def _next_events(self, count: int) -> range:
        first = self._last_event + 1
        self._last_event += count
        return range(first, first + count)

    def _count(self, caller: Caller) -> None:
        self._seen.counts = caller.counts()

    def _read_journals(self) -> None:
        for server in self._servers:
            try:
                self._seen.arrived.extend(read_journal(server.journal))
            except ValueError as error:
                self._seen.problems.append(f"a journal can't be read: {error}")
        count = Counter(self._seen.arrived)
        for event in (call.event for call in self._seen.calls if count[call.request] > 1):
            self._view.say(
                f"Event {event} arrived twice: its server had recorded it, and was killed before "
                "it answered. Failback delivers at least once: a receiver for whom that matters "
                "looks at the id."
            )


@contextlib.contextmanager
def _errors_logged_into(problems: list[str]) -> Iterator[None]:
    """Collect what rpcwheel logs as an error, and keep all that it logs off the screen."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            problems.append(record.getMessage())

    logger, collector = logging.getLogger("rpcwheel"), Collector(logging.ERROR)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield
    finally:
        logger.addHandler(logging.NullHandler())  # for what is logged when the process exits
        logger.removeHandler(collector)
        logger.propagate = propagate
