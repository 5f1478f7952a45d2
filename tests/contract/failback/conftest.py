"""Fixtures for the failback tests."""

from fixtures.failback_invokers import aio_invoker, decorate, invoker  # noqa: F401
from fixtures.grpc_servers import aio_channel, channel  # noqa: F401
from fixtures.shop import shop  # noqa: F401
