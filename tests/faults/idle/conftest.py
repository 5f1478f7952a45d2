"""What this room's tests share: servers of both worlds with a detector, and certificates."""

from fixtures.certificates import certificates  # noqa: F401 - a fixture
from fixtures.idle_server import channel, server  # noqa: F401 - fixtures
from fixtures.idle_worlds import world  # noqa: F401 - a fixture
