"""Fixtures: servers whose connections are tracked."""

from fixtures.idle_server import aio_world, channel, make_server, server  # noqa: F401 - fixtures
