"""Fixtures of the journals' tests: the engines, one of each for the session."""

import pytest

from fixtures.engine_postgresql import PostgresqlEngine
from fixtures.engines import engine_fixture
from rpcwheel.journal import open_journal_backend

postgresql = engine_fixture(PostgresqlEngine, "session")


@pytest.fixture
def opened():
    """Open journals, which are closed after the test."""
    journals = []

    def open_one(url):
        journals.append(open_journal_backend(url))
        return journals[-1]

    yield open_one
    for journal in journals:
        journal.close()
