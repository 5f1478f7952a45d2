"""Fixtures of pending calls."""

from fixtures.pending_worlds import world  # noqa: F401 - a fixture
from fixtures.timers import frequent_thread_switches  # noqa: F401 - a fixture
