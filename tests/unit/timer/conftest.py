"""Fixtures of the timer tests."""

from fixtures.timers import make_queue, make_timer  # noqa: F401 - fixtures
