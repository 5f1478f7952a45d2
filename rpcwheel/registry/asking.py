"""What users ask of an engine right now: who is there, and which services it knows.

Each is asked once, for all who wait when its turn comes. What was heard last is kept, for when the
engine can't be asked; so is the file of earlier runs, if there is one. What the engine says is
weighed, as what a watch tells is (`seen.py`): one that has lost its memory is not believed at once.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import RegistryClosed, RegistryUnavailable
from rpcwheel.instance import Snapshot
from rpcwheel.observe import InstancesChanged, RegistryFailed

from .seen import Rules, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .policy import RegistryPolicy
    from .provider import Provider
    from .snapshots import Snapshots

__all__ = ["Ask", "Asking", "Unreadable"]


class Unreadable(RegistryUnavailable):
    """The engine answers, with nothing that can be read: that is not an empty list."""


class Ask(NamedTuple):
    """One question."""

    service: str | None
    """None: for the names of all services."""
    answer: Future[Any]


class _Known(NamedTuple):
    """What was heard of a service, when last."""

    seen: Seen
    snapshot: Snapshot
    at_ns: int


class Asking:
    """The questions of one session. Those who ask hold its lock; `carry_out` comes without."""

    def __init__(
        self,
        provider: Provider,
        policy: RegistryPolicy,
        snapshots: Snapshots | None,
        now_ns: Callable[[], int],
        emit: Callable[..., object],
    ) -> None:
        self._provider = provider
        self._registry = str(provider.url)
        self._rules = Rules.of(policy)
        self._emit = emit
        self._snapshots = snapshots
        self._now_ns = now_ns
        self._waiting: dict[str | None, Ask] = {}
        self._known: dict[str, _Known] = {}
        self._mute: dict[str, Seen] = {}
        """Services none of whose records could be read, which is told of each once."""

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
            if not isinstance(error, RegistryClosed):  # by its user: no failure
                self._emit(RegistryFailed(self._registry, "lookup", error, None))
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
        known = self._known.get(service)
        if known is not None:
            age_s = to_seconds(max(0, self._now_ns() - known.at_ns))
            return replace(known.snapshot, source="cache", age_s=age_s)
        return None if self._snapshots is None else self._snapshots.load(service)

    def remember(self, snapshot: Snapshot) -> None:
        """Take over what was known of a service by other means. Any thread."""
        now_ns, age_ns = self._now_ns(), to_ns(snapshot.age_s)
        if snapshot.instances:
            seen = self._new_seen(snapshot.service, now_ns)
            seen.remember(snapshot.instances, age_ns, now_ns)
            self._known[snapshot.service] = _Known(seen, snapshot, now_ns - age_ns)

    def _services(self) -> tuple[str, ...]:
        return tuple(self._provider.services())

    def _new_seen(self, service: str, now_ns: int) -> Seen:
        return Seen(self._registry, service, self._rules, now_ns)

    def _look_up(self, service: str) -> Snapshot:
        try:
            view = self._provider.lookup(service)
        except BaseException as error:
            known = self._known.get(service)
            if known is not None:
                self._say(known.seen.suspect(str(error), self._now_ns()))
            raise
        now_ns = self._now_ns()
        known = self._known.get(service)
        if known is None or (view.records and now_ns - known.at_ns > self._rules.hold_ns):
            # What was so long ago says nothing of now.
            seen = self._mute.pop(service, None) or self._new_seen(service, now_ns)
        else:
            seen = known.seen
        self._say(seen.saw(view.records, now_ns))
        return self._noted(service, seen, now_ns)

    def _noted(self, service: str, seen: Seen, now_ns: int) -> Snapshot:
        if seen.shown is None:
            self._mute[service] = seen
            raise Unreadable(
                f"none of the records of {service} at {self._registry} can be read; RecordSkipped "
                "tells why"
            )
        known = self._known.get(service)
        shown = seen.shown.at(now_ns)
        before = Snapshot(service) if known is None else known.snapshot
        changed = (shown.instances, shown.held) != (before.instances, before.held)
        snapshot = replace(shown, revision=before.revision + changed)
        if known is not None or shown.instances:  # names that are made up would be kept for ever
            self._known[service] = _Known(seen, snapshot, now_ns)
            if self._snapshots is not None:
                self._snapshots.keep(service, snapshot.instances)
        return snapshot

    def _say(self, events: Iterable[object]) -> None:
        """Emit all but changes: nobody follows a service that is looked up."""
        self._emit(*(one for one in events if not isinstance(one, InstancesChanged)))
