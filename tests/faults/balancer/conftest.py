"""Fixtures of the fault tests of balanced channels."""

from fixtures.serving_process import start_serving  # noqa: F401 - a fixture
from fixtures.shops import memory  # noqa: F401
from fixtures.timer_and_events import events  # noqa: F401
