"""Fixtures: servers with a limit."""

from fixtures.limited_servers import limited  # noqa: F401 - a fixture
from fixtures.worlds import world  # noqa: F401 - a fixture
