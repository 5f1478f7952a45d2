"""Fixtures of heartbeats: both worlds, a server with a health service, and channels to it."""

from fixtures.heartbeats import (  # noqa: F401 - fixtures
    channel,
    make_manager,
    manager,
    open_channel,
    server,
    slow_handler,
)
from fixtures.worlds import world  # noqa: F401 - a fixture
