"""The journal in Redis: what a request ends with if the journal is closed meanwhile."""

import pytest
import redis

from fixtures.journal_calls import new_call
from rpcwheel.errors import JournalOutcomeUnknown, JournalUnavailable
from rpcwheel.journal import open_journal_backend


@pytest.mark.parametrize(
    ("command", "request_of", "raised"),
    [
        ("evalsha", lambda journal: journal.append([new_call(1)]), JournalOutcomeUnknown),
        ("hkeys", lambda journal: journal.depths(), JournalUnavailable),
    ],
    ids=["append", "depths"],
)
@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError, ValueError])
def test_a_request_that_close_cuts_is_unavailable_or_has_an_unknown_outcome(
    monkeypatch, error, command, request_of, raised
):
    journal = open_journal_backend("redis://127.0.0.1:1")

    def cut(*_: object) -> None:
        journal.close()
        raise error("as redis-py, whose socket is gone")

    monkeypatch.setattr(redis.Redis, "info", lambda _: {"aof_enabled": 1})
    monkeypatch.setattr(redis.Redis, "get", lambda *_: b"1")
    monkeypatch.setattr(redis.Redis, command, cut)
    with pytest.raises(raised, match="closed during the request") as caught:
        request_of(journal)
    assert type(caught.value) is raised
    assert type(caught.value.__cause__.__cause__) is error
