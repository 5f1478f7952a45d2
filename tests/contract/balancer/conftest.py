"""Fixtures of the tests of balanced channels."""

from fixtures.certificates import certificates  # noqa: F401
from fixtures.clusters import dead, shops  # noqa: F401
