"""What these tests share: both worlds, a server that is asked, and channels to it."""

from fixtures.heartbeat_twins import (  # noqa: F401 - fixtures
    asked,
    channel,
    manager,
    slow_events,
    twin,
)
