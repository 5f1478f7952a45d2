"""The journal in Redis: what a request ends with if the journal is closed meanwhile."""

import pytest
import redis

from fixtures.journal_calls import new_call
from rpcwheel.errors import JournalOutcomeUnknown
from rpcwheel.journal import open_journal_backend


@pytest.mark.parametrize("error", [AttributeError, OSError, ValueError])
def test_a_call_that_is_stored_while_the_journal_is_closed_may_be_stored(monkeypatch, error):
    journal = open_journal_backend("redis://127.0.0.1:1")

    def cut(*_: object) -> None:
        journal.close()
        raise error("as redis-py, whose socket is gone")

    monkeypatch.setattr(redis.Redis, "info", lambda _: {"aof_enabled": 1})
    monkeypatch.setattr(redis.Redis, "get", lambda *_: b"1")
    monkeypatch.setattr(redis.Redis, "evalsha", cut)
    with pytest.raises(JournalOutcomeUnknown, match="closed during the request"):
        journal.append([new_call(1)])
