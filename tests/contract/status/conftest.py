"""Fixtures of the contract tests of the live view."""

from fixtures.shop import shop  # noqa: F401 - a fixture
from fixtures.shops import make_aio_shop, make_shop, memory  # noqa: F401 - fixtures
from fixtures.worlds import world  # noqa: F401 - a fixture
