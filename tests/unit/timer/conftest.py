"""Fixtures of the timer tests."""

from fixtures.timers import (  # noqa: F401 - fixtures
    frequent_thread_switches,
    make_queue,
    make_timer,
)
