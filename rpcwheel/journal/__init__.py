"""Journals: where failback keeps the calls that must survive the process.

`FailbackPolicy(journal=URL)` stores failed calls in the journal at that URL:

* `sqlite:///var/lib/shop/failback.db`: a file, for the processes of one machine. Needs nothing.
* `postgresql://user:password@host/db`: for workers on many machines; what it has stored is never
  lost. Needs `rpcwheel[postgresql]`.
* `redis://user:password@host:6379`: the same, as durable as the server is configured to be. Needs
  `rpcwheel[redis]`.

Option of all: `?lease=15`, the seconds after which the calls of a process that has died are taken
over by others. The command `rpcwheel journal` lists, repeats and deletes calls, and delivers them
without the application. In a program, `open_journal_backend` gives access to them::

    journal = open_journal_backend("sqlite:///var/lib/shop/failback.db")
    for call in journal.select(Filter(states=(CallState.DEAD,))):
        print(call.id, call.method, call.reason)
    journal.retry(Filter(states=(CallState.DEAD,)))
    journal.close()

`backend.py` is the contract of an engine, and `rpcwheel.testing.check_journal` tests it. The queue
of a process is `rpcwheel.failback.journaled`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from . import backend
    from .backend import CallState, Depth, Filter, JournalBackend, NewCall, StoredCall
    from .opening import open_journal_backend
    from .url import JournalUrl
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".backend": "CallState Depth Filter JournalBackend NewCall StoredCall",
            ".opening": "open_journal_backend",
            ".url": "JournalUrl",
        },
        submodules="backend",
    )

__all__ = [
    "CallState",
    "Depth",
    "Filter",
    "JournalBackend",
    "JournalUrl",
    "NewCall",
    "StoredCall",
    "open_journal_backend",
]
