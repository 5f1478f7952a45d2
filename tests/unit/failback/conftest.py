"""Fixtures for the unit tests of failback."""

from fixtures.timers import frequent_thread_switches  # noqa: F401 - a fixture
