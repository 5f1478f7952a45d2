"""Fixtures for the tests of `rpcwheel.testing`."""

from fixtures.grpc_servers import aio_channel, channel  # noqa: F401
from fixtures.worlds import world  # noqa: F401 - a fixture
