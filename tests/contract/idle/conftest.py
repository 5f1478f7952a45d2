"""Fixtures: a threaded server whose connections are tracked."""

from fixtures.certificates import certificates  # noqa: F401 - a fixture
from fixtures.idle_server import channel, server  # noqa: F401 - fixtures
