"""Fixtures of the registry tests: servers in this process and in others."""

from fixtures.listeners import listen  # noqa: F401 - a fixture
from fixtures.serving_process import start_serving  # noqa: F401 - a fixture
from fixtures.shops import make_shop  # noqa: F401 - a fixture
