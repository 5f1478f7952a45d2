"""Fixtures of the fault tests of kits."""

from fixtures.server_process import shop, two_servers  # noqa: F401 - fixtures
from fixtures.shops import memory  # noqa: F401
from fixtures.worlds import world  # noqa: F401
