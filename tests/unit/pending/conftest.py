"""What this room's tests share: both twins of the pending calls, and a server to call."""

from fixtures.pending_worlds import world  # noqa: F401 - a fixture
from fixtures.timers import hasty_threads  # noqa: F401 - a fixture
