"""Fixtures of the registry's tests: servers, backends and certificates."""

from fixtures.certificates import certificates  # noqa: F401 - a fixture
from fixtures.flaky_backends import backend  # noqa: F401 - a fixture
from fixtures.listeners import listen  # noqa: F401 - a fixture
from fixtures.shops import make_aio_shop, make_shop, memory  # noqa: F401 - fixtures
from fixtures.worlds import world  # noqa: F401 - a fixture
