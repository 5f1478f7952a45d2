"""What users ask of an engine right now: who is there, and which services it knows.

Each is asked once, for all who wait when its turn comes. What was heard last is kept, for when the
engine can't be asked; so is the file of earlier runs, if there is one.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rpcwheel.durations import to_seconds
from rpcwheel.instance import Snapshot
from rpcwheel.observe import RegistryFailed, emit

from .seen import Records

if TYPE_CHECKING:
    from collections.abc import Callable

    from .provider import Provider
    from .snapshots import Snapshots

__all__ = ["Ask", "Asking"]


class Ask(NamedTuple):
    """One question."""

    service: str | None
    """None: for the names of all services."""
    answer: Future[Any]


class Asking:
    """The questions of one session. Those who ask hold its lock; `carry_out` comes without."""

    def __init__(
        self,
        provider: Provider,
        registry: str,
        snapshots: Snapshots | None,
        now_ns: Callable[[], int],
    ) -> None:
        self._provider = provider
        self._registry = registry
        self._snapshots = snapshots
        self._now_ns = now_ns
        self._waiting: dict[str | None, Ask] = {}
        self._records: dict[str, Records] = {}
        self._last: dict[str, tuple[Snapshot, int]] = {}
        """With the time."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def ask(self, service: str | None) -> Future[Any]:
        """Wait for the answer of the engine; the future may be another's too."""
        ask = self._waiting.get(service)
        if ask is None:
            ask = self._waiting[service] = Ask(service, Future())
        return ask.answer

    def take(self) -> Ask | None:
        """The oldest question, which is then to be carried out."""
        if not self._waiting:
            return None
        return self._waiting.pop(next(iter(self._waiting)))

    def carry_out(self, ask: Ask) -> BaseException | None:
        """Ask the engine, and answer; gives the error, if it is one."""
        try:
            answer = self._services() if ask.service is None else self._look_up(ask.service)
        except BaseException as error:  # noqa: BLE001 - it goes to whoever asks
            emit(RegistryFailed(self._registry, "lookup", error, None))
            ask.answer.set_exception(error)
            return error
        ask.answer.set_result(answer)
        return None

    def refuse(self, error: BaseException) -> None:
        """Answer all that wait in this way."""
        while ask := self.take():
            ask.answer.set_exception(error)

    def last(self, service: str) -> Snapshot | None:
        """What was heard last, now or by an earlier run; None: nothing. May read a file."""
        known = self._last.get(service)
        if known is not None:
            snapshot, at_ns = known
            return replace(snapshot, source="cache", age_s=to_seconds(self._now_ns() - at_ns))
        return None if self._snapshots is None else self._snapshots.load(service)

    def _services(self) -> tuple[str, ...]:
        return tuple(self._provider.services())

    def _look_up(self, service: str) -> Snapshot:
        now_ns = self._now_ns()
        view = self._provider.lookup(service)
        records = self._records.get(service) or Records(self._registry, service)
        instances, skipped = records.read(view.records)
        before, _ = self._last.get(service, (Snapshot(service), 0))
        found = tuple(instances.values())
        revision = before.revision + (found != before.instances)
        snapshot = Snapshot(service, found, revision)
        if found or before.instances:  # or names that are made up would be kept for ever
            self._records[service], self._last[service] = records, (snapshot, now_ns)
            if self._snapshots is not None:
                self._snapshots.keep(service, found)
        for one in skipped:
            emit(one)
        return snapshot
