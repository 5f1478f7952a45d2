"""Fixtures of the journals' tests: the engines, one of each for the session."""

import pytest

from fixtures.engine_postgresql import PostgresqlEngine
from fixtures.engine_redis import DurableRedis, RedisEngine
from fixtures.engine_watchers import namespace, tls_files  # noqa: F401 - fixtures
from fixtures.engines import engine_fixture
from fixtures.journals import script, url  # noqa: F401
from fixtures.listeners import listen  # noqa: F401 - a fixture
from rpcwheel.journal import open_journal_backend

postgresql = engine_fixture(PostgresqlEngine, "session")
redis = engine_fixture(RedisEngine, "session")

own_postgresql = engine_fixture(PostgresqlEngine, "session")
own_redis = engine_fixture(DurableRedis, "session")
"""Servers that tests kill, freeze and configure."""


@pytest.fixture
def opened(closed_later):
    """Open journals, which are closed after the test."""
    return lambda given: closed_later(open_journal_backend(given))


@pytest.fixture
def impatient(set_limit):
    """Requests to servers wait for 1 s."""
    set_limit("journal.redis.TIMEOUT_S", 1.0)
    set_limit("journal.postgresql.TIMEOUT_S", 1.0)
    set_limit("journal.postgresql.SCAN_TIMEOUT_S", 1.0)
    set_limit("journal.postgresql.MARGIN_S", 0.2)
