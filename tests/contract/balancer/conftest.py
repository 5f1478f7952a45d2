"""Fixtures of the tests of balanced channels."""

from fixtures.aio_channels import aio_balanced  # noqa: F401
from fixtures.balanced_channels import dead, open_balanced, shops  # noqa: F401
from fixtures.certificates import certificates  # noqa: F401
from fixtures.worlds import world  # noqa: F401
