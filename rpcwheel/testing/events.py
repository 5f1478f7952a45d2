"""The events that are emitted during a test."""

from __future__ import annotations

from typing import Self, TypeVar

from rpcwheel.events import Event, TaskSlow, add_sink, remove_sink

E = TypeVar("E", bound=Event)


class RecordedEvents(list[Event]):
    """A list to which each event is added, from the `with` statement to its end.

    `TaskSlow` is left out: it depends on the load of the machine. Other threads add events, so a
    test waits for the events that it expects::

        (event,) = wait_until(lambda: events.of(FailbackDelivered))
    """

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of a class so far, in order."""
        return [event for event in self if isinstance(event, kind)]

    def __enter__(self) -> Self:
        add_sink(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        remove_sink(self._add)

    def _add(self, event: Event) -> None:
        if not isinstance(event, TaskSlow):
            self.append(event)
