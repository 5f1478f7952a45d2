"""Fixtures of the registry tests: small servers, registries, and certificates."""

from fixtures.certificates import certificates  # noqa: F401 - a fixture
from fixtures.flaky_backends import backend  # noqa: F401 - a fixture
from fixtures.serving_process import start_serving  # noqa: F401 - a fixture
from fixtures.shops import make_aio_shop, make_shop, memory  # noqa: F401 - fixtures
