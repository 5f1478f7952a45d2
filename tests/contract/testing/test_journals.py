"""`check_journal`: broken journals are detected, and the messages of failed checks."""

import re
from dataclasses import replace

import pytest

from rpcwheel.errors import JournalUnavailable
from rpcwheel.journal.sqlite import SqliteJournal
from rpcwheel.journal.url import parse_journal_url
from rpcwheel.testing import JOURNAL_CHECKS, check_journal

MODEL = "requests_agree_with_a_reference"


@pytest.fixture
def failure_of(tmp_path):
    """Return the message of a check that fails with a kind of backend."""

    def run(name, kind):
        url = parse_journal_url(f"sqlite://{tmp_path}/{kind.__name__}.db")
        with pytest.raises(AssertionError) as failed:
            JOURNAL_CHECKS[name](lambda: kind(url))
        return str(failed.value)

    return run


def broken(**methods):
    """A class of journals whose methods call these functions with the method that they replace."""

    def replaced(name, function):
        method = getattr(SqliteJournal, name)
        return lambda self, *args, **options: function(
            lambda *args, **options: method(self, *args, **options), *args, **options
        )

    overrides = {name: replaced(name, function) for name, function in methods.items()}
    return type("Broken", (SqliteJournal,), overrides)


def take_all(take, worker, lease_s, routes, within_s):
    return take(worker, lease_s, [replace(route, limit=99) for route in routes], within_s)


BROKEN = {
    "appended_calls_are_kept_unchanged": [
        broken(append=lambda append, calls: append([replace(call, key="") for call in calls])),
        broken(append=lambda append, calls: append([replace(each, delay_s=0.0) for each in calls])),
        broken(append=lambda append, calls: append(calls)[::-1]),
    ],
    "ready_calls_of_the_routes_are_taken_when_they_are_due": [
        broken(take=lambda take, worker, lease_s, routes, within_s: take(worker, 9, routes, 1e6)),
        broken(take=lambda take, *args: take(*args)[::-1]),
        broken(take=take_all),
    ],
    "results_of_taken_calls_are_stored_and_others_ignored": [
        broken(report=lambda report, *args: report(*args) and []),
        broken(report=lambda _, worker, results: [result.id for result in results]),
    ],
    "released_calls_are_ready_at_once": [broken(release=lambda *_: None)],
    "only_a_worker_that_has_taken_calls_has_a_lease": [broken(renew=lambda *_: True)],
    "waiting_and_dead_calls_are_retried_now": [
        broken(retry=lambda retry, chosen: retry(replace(chosen, ids=()))),
        broken(retry=lambda retry, chosen: retry(chosen) + 1),
    ],
    "deleted_calls_are_gone": [
        broken(delete=lambda delete, chosen: delete(replace(chosen, states=None)))
    ],
    "depths_count_calls_by_state": [
        broken(depths=lambda depths: [replace(depth, dead=0) for depth in depths()]),
        broken(depths=lambda depths: depths()[::-1]),
    ],
    "routes_have_ready_calls": [broken(routes=lambda routes: routes()[1:])],
}
"""Journals that break a rule of the random check, which names it."""


@pytest.mark.parametrize("rule", BROKEN)
def test_a_journal_that_breaks_a_rule_fails_the_random_check_which_names_the_rule(rule, failure_of):
    for kind in BROKEN[rule]:
        found = failure_of(MODEL, kind)
        assert re.match(rf"{MODEL}: {rule}: \w.{{20}}", found), found


def test_the_message_of_a_failed_check_has_the_expected_and_the_actual_result(failure_of):
    kind = broken(report=lambda report, worker, results: report(worker, results[:1]))
    found = failure_of("a_call_that_is_taken_over_still_blocks", broken(release=lambda *_: None))
    assert "after a release the calls must be 1 READY, 2 BLOCKED, but are 1 TAKEN, 2 BLOC" in found
    found = failure_of(MODEL, kind)
    assert re.search(r"must return the ids .* that the worker does not have, \[.*\], not \[", found)


def test_a_check_that_waits_in_vain_says_for_what(failure_of, set_limit):
    class NeverEnds(SqliteJournal):
        def take(self, worker, lease_s, routes, within_s):
            return super().take(worker, lease_s + 1e6, routes, within_s)

    set_limit("testing.conformance.journal_harness.TIMEOUT_S", 0.05)
    found = failure_of("calls_are_taken_over_when_a_lease_ends", NeverEnds)
    assert "[1, 2, 3] must be taken over, but only [] were (after 0.05 s)" in found


def test_a_factory_that_returns_no_journal_is_reported():
    with pytest.raises(AssertionError, match=r"make\(\) must return a .*JournalBackend, not 'x'"):
        JOURNAL_CHECKS[MODEL](lambda: "x")


def test_errors_of_a_journal_are_reported_and_end_the_checks(failure_of, tmp_path):
    class Careless(SqliteJournal):
        def select(self, chosen, *, after=0, limit=100):
            raise self.error

    Careless.error = KeyError("id")
    assert "raised KeyError('id'); only JournalUnavailable" in failure_of(MODEL, Careless)
    Careless.error = JournalUnavailable("no disk")
    url = parse_journal_url(f"sqlite://{tmp_path}/journal.db")
    text = r"a request failed: JournalUnavailable: no disk"
    with pytest.raises(AssertionError, match=rf"^{MODEL}: \w+: {text}"):
        check_journal(lambda: Careless(url))
