"""For tests: a gRPC server and a registry that fail on command, events, and no waits.

`FlakyServer` shows your client code a server that fails, hangs or is down. `RecordedEvents` records
what rpcwheel reports, `no_waits` removes the waits before retries. pytest has these as the fixtures
`flaky_server`, `rpcwheel_events` and `no_waits`, and a `ManualTimer` as `manual_timer`.

`FlakyBackend` shows your program a registry that is down, frozen or has lost its data.
`check_backend` checks whether a backend of yours keeps the contract of `RegistryBackend`.
`check_journal` does the same for `JournalBackend`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from .backoff import no_waits
    from .events import RecordedEvents
    from .flaky import FlakyBackend
    from .journals import JOURNAL_CHECKS, check_journal
    from .registries import BACKEND_CHECKS, check_backend
    from .server import FlakyServer, ReceivedCall
    from .waiting import aio_wait_until, wait_until
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".backoff": "no_waits",
            ".events": "RecordedEvents",
            ".flaky": "FlakyBackend",
            ".journals": "JOURNAL_CHECKS check_journal",
            ".registries": "BACKEND_CHECKS check_backend",
            ".server": "FlakyServer ReceivedCall",
            ".waiting": "aio_wait_until wait_until",
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
