"""An interrupt while the journal stores a group of calls."""

import pytest

from fixtures.journal_calls import new_call
from fixtures.waiting import WAIT_S
from rpcwheel.errors import JournalOutcomeUnknown
from rpcwheel.journal.journal import open_journal

MANY = 1_000_000


def test_an_append_that_is_interrupted_may_be_stored(tmp_path, monkeypatch):
    journal = open_journal(f"sqlite://{tmp_path}/calls.db")

    def interrupt(calls):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal.backend, "append", interrupt)
        with journal._turn:
            other = journal._add(new_call(), MANY)
        with pytest.raises(KeyboardInterrupt):
            journal.append_now(new_call(), MANY)
    with pytest.raises(JournalOutcomeUnknown, match="interrupted by KeyboardInterrupt"):
        other.result(WAIT_S)
    assert journal.append_now(new_call(), MANY) == 1
    journal.close()
