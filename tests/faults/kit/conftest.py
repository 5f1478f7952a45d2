"""Fixtures of the fault tests of kits."""

from fixtures.shops import memory  # noqa: F401
from fixtures.timer_and_events import events  # noqa: F401
