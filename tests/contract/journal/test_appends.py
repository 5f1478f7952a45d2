"""Calls of several threads are stored together, and each caller gets the result of its own call."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fixtures.journal_calls import new_call
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import JournalFull, JournalRefused, JournalUnavailable
from rpcwheel.journal.journal import open_journal

LIMIT = 1000


@pytest.fixture
def journal(tmp_path):
    journal = open_journal(f"sqlite://{tmp_path}/journal.db")
    yield journal
    journal.close()


@pytest.fixture
def batches(journal, monkeypatch):
    """The numbers of calls in each transaction; the first one waits for `batches.begin`."""

    class Batches(list):
        begin = threading.Event()

    batches, append = Batches(), journal.backend.append

    def slow(calls):
        batches.append(len(calls))
        if len(batches) == 1:
            batches.begin.wait(WAIT_S)
        return append(calls)

    monkeypatch.setattr(journal.backend, "append", slow)
    return batches


def test_calls_that_come_during_a_transaction_are_stored_by_the_next_one(journal, batches):
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(journal.append_now, new_call(0), LIMIT)
        wait_until(lambda: batches)
        others = [pool.submit(journal.append_now, new_call(each), LIMIT) for each in range(1, 7)]
        wait_until(lambda: len(journal._appends) == 6)
        batches.begin.set()
        ids = {first.result(WAIT_S)} | {other.result(WAIT_S) for other in others}
    assert batches == [1, 6]
    assert len(ids) == 7
    assert journal.stored("orders") == 7


def test_the_limit_holds_for_calls_alone_and_together(journal, batches):
    batches.begin.set()
    assert journal.append_now(new_call(0), 1) == 1
    with pytest.raises(JournalFull, match=r"has max_pending \(1\) calls of 'orders'"):
        journal.append_now(new_call(1), 1)
    batches.clear()
    batches.begin.clear()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(journal.append_now, new_call(2), LIMIT)
        wait_until(lambda: batches)
        others = [pool.submit(journal.append_now, new_call(each), 3) for each in (3, 4)]
        wait_until(lambda: len(journal._appends) == 2)
        batches.begin.set()
        first.result(WAIT_S)
        assert sorted(other.exception(WAIT_S) is None for other in others) == [False, True]
    assert journal.stored("orders") == 3


@pytest.mark.parametrize(
    ("error", "raised", "failing"),
    [
        (JournalUnavailable("gone"), JournalUnavailable, True),
        (KeyError("x"), JournalRefused, False),
    ],
)
def test_a_caller_alone_gets_the_error_of_the_engine(journal, monkeypatch, error, raised, failing):
    def fail(_):
        raise error

    monkeypatch.setattr(journal.backend, "append", fail)
    with pytest.raises(raised):
        journal.append_now(new_call(), LIMIT)
    assert journal.is_failing is failing
    monkeypatch.undo()
    assert journal.append_now(new_call(), LIMIT) == 1
    assert not journal.is_failing
