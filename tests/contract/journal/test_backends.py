"""Every engine keeps the contract of journals."""

import pytest

from rpcwheel.journal import open_journal_backend
from rpcwheel.testing import JOURNAL_CHECKS


@pytest.fixture(params=JOURNAL_CHECKS)
def check(request, set_limit):
    if request.param != "a_renewed_lease_does_not_end":  # before it has renewed it
        set_limit("testing.conformance.journal_checks.SHORT_S", 0.1)
        set_limit("testing.conformance.journal_harness.SHORT_S", 0.1)
    return JOURNAL_CHECKS[request.param]


def test_sqlite_keeps_the_contract(check, tmp_path):
    check(lambda: open_journal_backend(f"sqlite://{tmp_path}/journal.db"))


def test_postgresql_keeps_the_contract(check, postgresql):
    check(lambda: open_journal_backend(postgresql.journal_url()))


def test_redis_keeps_the_contract(check, redis):
    check(lambda: open_journal_backend(redis.url()))
