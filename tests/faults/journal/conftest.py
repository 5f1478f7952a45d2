"""Fixtures for the tests of journals with real processes."""

import contextlib
from urllib.parse import urlencode

import pytest

from fixtures.engine_postgresql import PostgresqlEngine
from fixtures.engine_redis import DurableRedis
from fixtures.engines import engine_fixture
from fixtures.journal_clients import JournalClient
from fixtures.recording_server import RecordingServer
from fixtures.worlds import world  # noqa: F401 - a fixture


class DurablePostgresql(PostgresqlEngine):
    """PostgreSQL with the durability that it has by default."""

    def __init__(self) -> None:
        """Prepare it."""
        super().__init__("-c", "fsync=on", "-c", "synchronous_commit=on")


postgresql = engine_fixture(DurablePostgresql, "function")
redis = engine_fixture(DurableRedis, "function")


@pytest.fixture(params=["postgresql", "redis"])
def engine(request):
    """An engine in a process of its own."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def journal_url(request, tmp_path):
    """Makes the URL of a journal from its options."""

    def make(**options):
        if request.param == "sqlite":
            return f"sqlite://{tmp_path}/journal.db?{urlencode(options)}"
        return request.getfixturevalue(request.param).journal_url(**options)

    return make


@pytest.fixture
def server():
    """A server at which the first attempts of calls fail, and all others succeed."""
    with RecordingServer() as server:
        yield server


@pytest.fixture
def start_client():
    """Make a `JournalClient`, which is closed at the end of the test."""
    with contextlib.ExitStack() as opened:
        yield lambda *prefix: opened.enter_context(JournalClient(*prefix))


@pytest.fixture
def client(start_client):
    """A `JournalClient`."""
    return start_client()
