"""Fixtures of the tests of metrics."""

from fixtures.call_counts import call_counts  # noqa: F401 - a fixture
from fixtures.worlds import world  # noqa: F401 - a fixture
