"""What the tests of the timers share."""

from fixtures.timers import events, hasty_threads, make_queue  # noqa: F401 - fixtures
