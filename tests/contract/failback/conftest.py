"""Fixtures for the failback tests."""

from fixtures.failback_invokers import aio_invoker, decorate, invoker  # noqa: F401
from fixtures.grpc_servers import (  # noqa: F401 - fixtures
    aio_channel,
    aio_grpc_server,
    channel,
    grpc_server,
)
