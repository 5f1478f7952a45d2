"""Fixtures: servers whose connections are tracked."""

from fixtures.certificates import certificates  # noqa: F401 - a fixture
from fixtures.idle_server import aio_world, channel, make_server, server  # noqa: F401 - fixtures
from fixtures.worlds import world  # noqa: F401 - a fixture
