"""What this room's tests share: real servers to freeze, and clients of both worlds."""

from fixtures.certificates import certificates  # noqa: F401 - fixtures
from fixtures.heartbeat_twins import asked, channel, manager, slow_events, twin  # noqa: F401
from fixtures.heartbeat_worlds import open_client  # noqa: F401
from fixtures.proxy import open_proxy  # noqa: F401
from fixtures.server_process import start_server  # noqa: F401
