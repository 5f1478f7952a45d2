"""Fixtures of the fault tests of balanced channels."""

from fixtures.serving_process import start_serving  # noqa: F401 - a fixture
from fixtures.worlds import world  # noqa: F401
