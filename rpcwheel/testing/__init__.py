"""Tools for tests of programs that use rpcwheel, and of backends for it.

For tests of programs:

* `FlakyServer`: a gRPC server that fails, hangs or is down on command. It lists each call that it
  gets as a `ReceivedCall`.
* `FlakyBackend`: a registry that is down, frozen or has lost its data on command.
* `RecordedEvents`: the events that rpcwheel emits.
* `no_waits`: removes the waits before retries.
* `wait_until`, `aio_wait_until`: wait for a condition.

pytest finds the fixtures `flaky_server`, `rpcwheel_events`, `no_waits` and `manual_timer` (a
`rpcwheel.timer.ManualTimer`) without an import, by the plugin `_rpcwheel_pytest`.

For tests of backends: `check_backend` checks whether a backend keeps the contract of
`RegistryBackend`, and `check_journal` that of `JournalBackend`. `BACKEND_CHECKS` and
`JOURNAL_CHECKS` have the single checks, by name.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from .backends import BACKEND_CHECKS, JOURNAL_CHECKS, check_backend, check_journal
    from .backoff import no_waits
    from .flaky import FlakyBackend
    from .server import FlakyServer, ReceivedCall
    from .waiting import RecordedEvents, aio_wait_until, wait_until
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".backends": "BACKEND_CHECKS JOURNAL_CHECKS check_backend check_journal",
            ".backoff": "no_waits",
            ".flaky": "FlakyBackend",
            ".server": "FlakyServer ReceivedCall",
            ".waiting": "RecordedEvents aio_wait_until wait_until",
        },
    )

__all__ = [
    "BACKEND_CHECKS",
    "JOURNAL_CHECKS",
    "FlakyBackend",
    "FlakyServer",
    "ReceivedCall",
    "RecordedEvents",
    "aio_wait_until",
    "check_backend",
    "check_journal",
    "no_waits",
    "wait_until",
]
