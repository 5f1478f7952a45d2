"""Fixtures: a threaded server whose connections are tracked."""

from fixtures.idle_server import channel, server  # noqa: F401 - fixtures
