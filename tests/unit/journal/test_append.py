"""Calls that their callers append themselves, as to a file."""

import gc
import weakref
from contextlib import suppress

import pytest

from rpcwheel.errors import JournalError, JournalUnavailable
from rpcwheel.journal import NewCall
from rpcwheel.journal.journal import open_journal


class Method(str):  # noqa: SLOT000 - it has weak references
    pass


def refuse(calls):
    raise JournalUnavailable(f"{len(calls)} calls not stored")


@pytest.mark.parametrize("limit", [0, 1], ids=["the queue is full", "the engine fails"])
def test_a_call_that_is_not_stored_is_freed_without_the_garbage_collector(limit, tmp_path):
    """Its requests may be large, and many calls may fail while the disk is full."""
    journal = open_journal(f"sqlite:///{tmp_path}/calls.db")
    journal.backend.append = refuse

    def append():
        call = NewCall("orders", "shop", Method("/a/B"), "key", b"", 1.0, 60.0, 1, "", None)
        with suppress(JournalError):
            journal.append_now(call, limit)
            pytest.fail("it was stored")
        return weakref.ref(call.method)

    gc.disable()
    try:
        assert append()() is None
    finally:
        gc.enable()
        journal.close()
