"""The harness of the conformance checks of journals: backends, calls, and workers."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, Self

from rpcwheel.errors import RpcWheelError
from rpcwheel.journal.backend import CallState, Filter, JournalBackend, NewCall, Route, StoredCall
from rpcwheel.testing.waiting import wait_until

from .registry_harness import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

HOUR_S: Final = 3600.0
"""A lease or a delay that does not end during a check."""

SHORT_S: Final = 1.0
"""A lease that ends during a check."""

MANY: Final = 1_000_000
"""More calls than any check stores."""

TIMEOUT_S: Final = 30.0
"""Seconds until a check fails. A correct backend takes a small part of it."""


class JournalHarness:
    """The backends of one check, all on one engine. A context manager that closes them."""

    def __init__(self, make: Callable[[], JournalBackend]) -> None:
        self._make = make
        self._backends: list[JournalBackend] = []
        self._queues: set[str] = set()
        self.queue = f"check.{secrets.token_hex(6)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            if self._backends:
                backend = self.new()
                for queue in self._queues:
                    backend.delete(Filter(queue=queue))
        except RpcWheelError:
            if kind is None:
                raise
        finally:
            for backend in self._backends:
                backend.close()

    def new(self) -> JournalBackend:
        """Make another backend."""
        backend = self._make()
        require(
            isinstance(backend, JournalBackend),
            f"make() must return a rpcwheel.journal.backend.JournalBackend, not {backend!r}",
        )
        self._backends.append(backend)
        require(hasattr(backend, "url"), "it has no `url`: its __init__ must set it")
        return backend

    def call(
        self,
        number: int = 1,
        *,
        queue: str | None = None,
        target: str = "10.0.0.1:443",
        method: str = "/shop.Orders/Push",
        body: bytes | None = None,
        delay_s: float = 0.0,
        max_age_s: float = HOUR_S,
        attempts: int = 1,
        error: str = "",
        order_key: str | None = None,
    ) -> NewCall:
        """Make a call of this check's queue, or of another."""
        queue = self.queue if queue is None else queue
        self._queues.add(queue)
        return NewCall(
            queue=queue,
            target=target,
            method=method,
            key=f"key-{number}",
            body=str(number).encode() if body is None else body,
            delay_s=delay_s,
            max_age_s=max_age_s,
            attempts=attempts,
            error=error,
            order_key=order_key,
        )

    def append(self, backend: JournalBackend, *calls: NewCall) -> list[int]:
        """Append calls; check the number of ids."""
        ids = backend.append(calls)
        require(
            len(ids) == len(calls),
            f"append of {len(calls)} calls must return as many ids, not {ids!r}",
        )
        return ids

    def worker(self) -> str:
        """Return the name of a new worker."""
        return f"worker-{secrets.token_hex(6)}"

    def route(
        self, limit: int = MANY, *, queue: str | None = None, target: str = "10.0.0.1:443"
    ) -> Route:
        """Return the route of the calls that `call` makes."""
        return Route(self.queue if queue is None else queue, target, limit)

    def take(
        self,
        backend: JournalBackend,
        worker: str,
        *routes: Route,
        lease_s: float = HOUR_S,
        within_s: float = 0.0,
    ) -> list[StoredCall]:
        """Take calls of routes, or all that are due of this check's queue."""
        return backend.take(worker, lease_s, routes or [self.route()], within_s)

    def expect_taken(
        self,
        backend: JournalBackend,
        worker: str,
        *wanted: int,
        routes: Sequence[Route] = (),
        lease_s: float = HOUR_S,
        within_s: float = 0.0,
    ) -> list[StoredCall]:
        """Take calls; check that exactly the wanted ones are returned, in this order."""
        taken = self.take(backend, worker, *routes, lease_s=lease_s, within_s=within_s)
        require(
            [call.id for call in taken] == list(wanted),
            f"take must return the calls {list(wanted)}, not {[call.id for call in taken]}",
        )
        for call in taken:
            require(
                call.state is CallState.TAKEN, f"a call that was taken is TAKEN, not {call.state!r}"
            )
        return taken

    def wait_until_taken(
        self, backend: JournalBackend, worker: str, *wanted: int, lease_s: float = HOUR_S
    ) -> None:
        """Take until a worker has got these calls, as when the lease of another ends."""
        taken: list[int] = []

        def look() -> bool:
            taken.extend(call.id for call in self.take(backend, worker, lease_s=lease_s))
            return len(taken) >= len(wanted)

        wait(look, lambda: f"the calls {list(wanted)} must be taken over, but only {taken} were")
        require(
            sorted(taken) == sorted(wanted),
            f"the calls {list(wanted)} must be taken over, not {taken}",
        )

    def let_a_lease_end(self, backend: JournalBackend) -> None:
        """Return when a lease of `SHORT_S` has ended that began after this was called."""
        place = self.route(1, queue=f"{self.queue}.clock")
        (number,) = self.append(backend, self.call(queue=place.queue))
        self.expect_taken(backend, self.worker(), number, routes=[place], lease_s=SHORT_S)
        other = self.worker()
        wait(
            lambda: self.take(backend, other, place),
            lambda: "a call whose worker's lease has ended must be taken by another",
        )
        backend.report(other, [])
        backend.delete(Filter(ids=(number,)))

    def stored_calls(
        self, backend: JournalBackend, ids: Iterable[int] | None = None
    ) -> list[StoredCall]:
        """Return the stored calls of this check, or those with these ids."""
        wanted = None if ids is None else tuple(ids)
        return backend.select(Filter(queue=self.queue, ids=wanted), limit=MANY)

    def stored_call(self, backend: JournalBackend, number: int) -> StoredCall:
        """Return the stored call with this id."""
        calls = self.stored_calls(backend, [number])
        require(
            [call.id for call in calls] == [number],
            f"select must find the stored call {number}, not {calls}",
        )
        return calls[0]

    def expect_states(
        self, backend: JournalBackend, wanted: dict[int, CallState], where: str
    ) -> None:
        """Check that exactly these calls are stored, with these states."""
        stored = {call.id: call.state for call in self.stored_calls(backend)}
        require(
            stored == wanted, f"{where} the calls must be {shown(wanted)}, but are {shown(stored)}"
        )


def wait(look: Callable[[], object], otherwise: Callable[[], str]) -> None:
    """Wait until `look()` is true; raise AssertionError if that takes too long."""
    try:
        wait_until(look, TIMEOUT_S)
    except AssertionError:
        raise AssertionError(f"{otherwise()} (after {TIMEOUT_S:g} s)") from None


def shown(states: dict[int, CallState]) -> str:
    """Describe states in a message."""
    return ", ".join(f"{number} {state.name}" for number, state in states.items()) or "none"
