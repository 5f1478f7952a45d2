"""Fixtures for the tests of `rpcwheel.testing`."""

from fixtures.grpc_servers import aio_channel, channel  # noqa: F401
