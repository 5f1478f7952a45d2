"""`check_journal`, and the messages of failed checks."""

import pytest

from rpcwheel.errors import JournalUnavailable
from rpcwheel.journal.sqlite import SqliteJournal
from rpcwheel.journal.url import parse_journal_url
from rpcwheel.testing import JOURNAL_CHECKS, check_journal


@pytest.fixture
def failure_of(tmp_path):
    """Return the message of a check that fails with a kind of backend."""

    def run(name, kind):
        url = parse_journal_url(f"sqlite://{tmp_path}/{kind.__name__}.db")
        with pytest.raises(AssertionError) as failed:
            JOURNAL_CHECKS[name](lambda: kind(url))
        return str(failed.value)

    return run


def test_the_message_of_a_failed_check_has_the_expected_and_the_actual_result(failure_of):
    class TakesOnce(SqliteJournal):
        def take(self, worker, lease_s, routes, within_s):
            return super().take(worker, lease_s, routes, within_s + 1e6)

    found = failure_of("calls_are_taken_when_they_are_due", TakesOnce)
    assert found == (
        "calls_are_taken_when_they_are_due: take must return the calls [1], not [1, 2, 3]"
    )


def test_a_check_that_waits_in_vain_says_for_what(failure_of, set_limit):
    class NeverEnds(SqliteJournal):
        def take(self, worker, lease_s, routes, within_s):
            return super().take(worker, lease_s + 1e6, routes, within_s)

    set_limit("testing.conformance.journal_harness.TIMEOUT_S", 0.05)
    found = failure_of("calls_are_taken_over_when_a_lease_ends", NeverEnds)
    assert "[1, 2, 3] must be taken over, but only [] were (after 0.05 s)" in found


def test_a_factory_that_returns_no_journal_is_reported():
    with pytest.raises(AssertionError, match=r"make\(\) must return a .*JournalBackend, not 'x'"):
        JOURNAL_CHECKS["ids_increase"](lambda: "x")


def test_requests_that_fail_are_reported(failure_of):
    class Down(SqliteJournal):
        def append(self, calls):
            raise JournalUnavailable("no disk")

    found = failure_of("ids_increase", Down)
    assert found == "ids_increase: a request failed: JournalUnavailable: no disk"


def test_errors_that_a_journal_must_not_raise_are_reported(failure_of):
    class Careless(SqliteJournal):
        def append(self, calls):
            raise KeyError("id")

    assert "raised KeyError('id'); only JournalUnavailable" in failure_of("ids_increase", Careless)


def test_check_journal_ends_with_the_first_failure(tmp_path):
    class Forgets(SqliteJournal):
        def select(self, chosen, *, after=0, limit=100):
            return []

    url = parse_journal_url(f"sqlite://{tmp_path}/journal.db")
    with pytest.raises(AssertionError, match=r"^appended_calls_are_kept_unchanged: select must"):
        check_journal(lambda: Forgets(url))
