"""Fixtures of heartbeats: both worlds, a server with a health service, and channels to it."""

from fixtures.heartbeats import (  # noqa: F401 - fixtures
    channel,
    manager,
    server,
    slow_events,
    world,
)
