"""Fixtures of the timer tests."""

from fixtures.timers import events, frequent_thread_switches, make_queue  # noqa: F401 - fixtures
