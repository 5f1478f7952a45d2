"""What a process does if the engine has executed a request, and its answer was lost."""

import pytest

from fixtures.journal_calls import ROUTES, new_call
from fixtures.waiting import wait_until
from rpcwheel.errors import JournalUnavailable
from rpcwheel.journal import Filter
from rpcwheel.journal.backend import Delivered, Postponed
from rpcwheel.journal.journal import open_journal

WORKER = "w"
LIMIT = 1000


@pytest.fixture
def journal(tmp_path):
    journal = open_journal(f"sqlite://{tmp_path}/journal.db")
    yield journal
    journal.close()


@pytest.fixture
def late(journal):
    """The results that the journal ignored, according to the process."""
    ids = []
    journal.add_worker(WORKER, "orders", ids.extend)
    return ids


@pytest.fixture
def lose_answers(journal, monkeypatch):
    """Lets the answers of a request be lost; call the result to end that."""

    def lose(method):
        execute = getattr(journal.backend, method)

        def lost(*args):
            execute(*args)
            raise JournalUnavailable("the connection was lost")

        monkeypatch.setattr(journal.backend, method, lost)
        return lambda: monkeypatch.setattr(journal.backend, method, execute)

    return lose


def test_results_whose_answer_was_lost_are_stored_again_and_not_reported_as_late(
    journal, late, lose_answers
):
    for number in range(2):
        journal.append_now(new_call(number), LIMIT)
    first, second = journal.take(WORKER, ROUTES, 1.0)
    find = lose_answers("report")
    journal.report(WORKER, Delivered(first.id))
    journal.report(WORKER, Postponed(second.id, 2, 0.0, "again"))
    wait_until(lambda: journal.is_failing)
    find()
    assert [call.id for call in journal.take(WORKER, ROUTES, 1.0)] == [second.id]
    assert (journal.unstored_results, late, journal.stored("orders")) == (0, [], 1)


def test_a_result_after_one_whose_answer_was_lost_may_be_late(journal, late, lose_answers):
    number = journal.append_now(new_call(), LIMIT)
    journal.take(WORKER, ROUTES, 1.0)
    find = lose_answers("report")
    journal.report(WORKER, Postponed(number, 2, 0.0, "again"))
    wait_until(lambda: journal.is_failing)
    find()
    assert len(journal.take(WORKER, ROUTES, 1.0)) == 1
    journal.backend.delete(Filter())
    journal.report(WORKER, Delivered(number))
    wait_until(lambda: late)
    assert late == [number]


def test_no_call_is_taken_before_the_results_are_stored(journal, late, lose_answers):
    number = journal.append_now(new_call(), LIMIT)
    assert len(journal.take(WORKER, ROUTES, 1.0)) == 1
    find = lose_answers("report")
    journal.report(WORKER, Postponed(number, 2, 0.0, "again"))
    wait_until(lambda: journal.is_failing)
    with pytest.raises(JournalUnavailable):  # the repeated result would free the call again
        journal.take(WORKER, ROUTES, 1.0)
    find()
    assert len(journal.take(WORKER, ROUTES, 1.0)) == 1
