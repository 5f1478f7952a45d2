"""Fixtures of the unit tests of the publisher."""

from fixtures.shops import make_world_shop, memory  # noqa: F401 - fixtures
from fixtures.worlds import world  # noqa: F401 - a fixture
