"""What this room's tests share: both twins of the pending calls, and a server to call."""

from fixtures.echo import echo_server  # noqa: F401 - a fixture
from fixtures.pending_worlds import world  # noqa: F401 - a fixture
from fixtures.timers import frequent_thread_switches  # noqa: F401 - a fixture
