"""Fixtures: servers of `grpc` and `grpc.aio` with a detector, and certificates."""

from fixtures.certificates import certificates  # noqa: F401 - a fixture
from fixtures.worlds import world  # noqa: F401 - a fixture
