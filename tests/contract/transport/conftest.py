"""Fixtures of channels: a server, and channels of `grpc.aio` to it."""

from fixtures.aio_channels import channel, make  # noqa: F401 - fixtures
from fixtures.shop import shop  # noqa: F401
from fixtures.timers import frequent_thread_switches  # noqa: F401
