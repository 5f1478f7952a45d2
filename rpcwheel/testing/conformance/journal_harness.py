"""The harness of the conformance checks of journals: backends, calls, and workers.

Each check in `journal_checks.py` gets a `JournalHarness`. Its methods make what a check needs, or
take and read calls and raise AssertionError if the result is wrong. Other checks and programs may
use the engine at the same time, so the names of queues and workers are random.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final, Self

from rpcwheel.errors import RpcWheelError
from rpcwheel.journal.backend import CallState, Filter, JournalBackend, NewCall, Route, StoredCall
from rpcwheel.testing.waiting import wait_until

from .registry_harness import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HOUR_S: Final = 3600.0
"""The seconds of a lease or a delay that does not end during a check."""

SHORT_S: Final = 1.0
"""The seconds of a lease that ends during a check, by the clock of the engine."""

MANY: Final = 1_000_000
"""A limit above the number of calls that any check stores."""

TARGET: Final = "10.0.0.1:443"
"""The target of calls and routes, unless a check gives another. No connection is made to it."""

TIMEOUT_S: Final = 30.0
"""Seconds until a check fails. A correct backend takes a small part of it."""


class JournalHarness:
    """The backends of one check, all on one engine (such as one database).

    A context manager: at its end, it deletes the calls of the check and closes the backends.
    """

    def __init__(self, make: Callable[[], JournalBackend]) -> None:
        """`make` is called for each backend; all that it returns must use the same engine."""
        self._make = make
        self._backends: list[JournalBackend] = []
        self._queues: set[str] = set()
        self.queue = f"check.{secrets.token_hex(6)}"
        """The name of the queue of this check. Names of further queues begin with it."""
        self.rule = ""
        """The rule that is checked now, if the check has several."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            if self._backends:
                backend = self.new_backend()  # the check may have closed the others
                for queue in self._queues:
                    backend.delete(Filter(queue=queue))
        except RpcWheelError:
            if kind is None:  # otherwise the error of the check is raised
                raise
        finally:
            for backend in self._backends:
                backend.close()

    def new_backend(self) -> JournalBackend:
        """Make another backend on the engine, which is closed after the check."""
        backend = self._make()
        require(
            isinstance(backend, JournalBackend),
            f"make() must return a rpcwheel.journal.backend.JournalBackend, not {backend!r}",
        )
        self._backends.append(backend)
        # Journals and their events use it.
        require(hasattr(backend, "url"), "it has no `url`: its __init__ must set it")
        return backend

    def new_call(self, number: int = 1, **fields: Any) -> NewCall:
        """Make a call to append, with `number` in its key and body."""
        usual: dict[str, Any] = {
            "queue": self.queue,
            "target": TARGET,
            "method": "/shop.Orders/Push",
            "key": f"key-{number}",
            "body": str(number).encode(),
            "delay_s": 0.0,
            "max_age_s": HOUR_S,
        }
        call = NewCall(**usual | fields)
        self._queues.add(call.queue)
        return call

    def append(self, backend: JournalBackend, *calls: NewCall) -> list[int]:
        """Append calls; check that there are as many ids, and return them."""
        ids = backend.append(calls)
        require(
            len(ids) == len(calls),
            f"append of {len(calls)} calls must return as many ids, not {ids!r}",
        )
        return ids

    def new_worker(self) -> str:
        """Return the name of a new worker."""
        return f"worker-{secrets.token_hex(6)}"

    def route(self, limit: int = MANY, *, queue: str | None = None, target: str = TARGET) -> Route:
        """Return the route by which `limit` calls that `new_call` has made can be taken."""
        return Route(self.queue if queue is None else queue, target, limit)

    def take(
        self, backend: JournalBackend, worker: str, *routes: Route, lease_s: float = HOUR_S
    ) -> list[StoredCall]:
        """Take the calls of these routes that are due.

        Without routes: those of this check's queue to `TARGET`.
        """
        return backend.take(worker, lease_s, routes or [self.route()], 0.0)

    def expect_taken(
        self,
        backend: JournalBackend,
        worker: str,
        *wanted: int,
        routes: Sequence[Route] = (),
        lease_s: float = HOUR_S,
    ) -> list[StoredCall]:
        """Take calls; check that they are those with the ids `wanted`, in this order."""
        taken = self.take(backend, worker, *routes, lease_s=lease_s)
        require(
            [call.id for call in taken] == list(wanted),
            f"take must return the calls {list(wanted)}, not {[call.id for call in taken]}",
        )
        for call in taken:
            require(
                call.state is CallState.TAKEN, f"a call that was taken is TAKEN, not {call.state!r}"
            )
        return taken

    def wait_until_taken(self, backend: JournalBackend, worker: str, *wanted: int) -> None:
        """Take repeatedly until a worker has the calls with the ids `wanted`, and no others.

        For calls that become ready when the lease of another worker ends.
        """
        taken: list[int] = []

        def look() -> bool:
            taken.extend(call.id for call in self.take(backend, worker))
            return len(taken) >= len(wanted)

        wait(look, lambda: f"the calls {list(wanted)} must be taken over, but only {taken} were")
        require(
            sorted(taken) == sorted(wanted),
            f"the calls {list(wanted)} must be taken over, not {taken}",
        )

    def let_a_lease_end(self, backend: JournalBackend) -> None:
        """Wait until every lease of `SHORT_S` has ended that was begun before.

        The clock of the engine decides that. So a worker takes a call of a separate queue with such
        a lease, and another worker tries to take this call until it gets it.
        """
        route = self.route(1, queue=f"{self.queue}.clock")
        (call_id,) = self.append(backend, self.new_call(queue=route.queue))
        self.expect_taken(backend, self.new_worker(), call_id, routes=[route], lease_s=SHORT_S)
        other = self.new_worker()
        wait(
            lambda: self.take(backend, other, route),
            lambda: "a call whose worker's lease has ended must be taken by another",
        )
        backend.delete(Filter(ids=(call_id,)))

    def stored_calls(self, backend: JournalBackend) -> list[StoredCall]:
        """Return the stored calls of this check."""
        return backend.select(Filter(queue=self.queue), limit=MANY)

    def stored_call(self, backend: JournalBackend, call_id: int) -> StoredCall:
        """Return the stored call with this id."""
        calls = backend.select(Filter(queue=self.queue, ids=(call_id,)))
        require(
            [call.id for call in calls] == [call_id],
            f"select must find the stored call {call_id}, not {calls}",
        )
        return calls[0]

    def expect_states(
        self, backend: JournalBackend, wanted: dict[int, CallState], where: str
    ) -> None:
        """Check that exactly the calls with these ids are stored, with these states.

        `where` begins the message: "after the lease has ended", for example.
        """
        stored = {call.id: call.state for call in self.stored_calls(backend)}
        require(
            stored == wanted, f"{where} the calls must be {shown(wanted)}, but are {shown(stored)}"
        )


def wait(look: Callable[[], object], otherwise: Callable[[], str]) -> None:
    """Wait until `look()` is true; after `TIMEOUT_S` raise AssertionError with `otherwise()`."""
    try:
        wait_until(look, TIMEOUT_S)
    except AssertionError:
        raise AssertionError(f"{otherwise()} (after {TIMEOUT_S:g} s)") from None


def shown(states: dict[int, CallState]) -> str:
    """Describe states, by the ids of the calls, in a message."""
    return ", ".join(f"{call_id} {state.name}" for call_id, state in states.items()) or "none"
