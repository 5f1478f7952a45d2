"""Fixtures of fault tests: servers that can be frozen, and clients of both worlds."""

import pytest

from fixtures.certificates import certificates  # noqa: F401 - fixtures
from fixtures.heartbeat_clients import open_client  # noqa: F401
from fixtures.proxy import Proxy, open_proxy  # noqa: F401
from fixtures.server_process import (  # noqa: F401
    KillableServer,
    shop,
    start_server,
    two_servers,
)


@pytest.fixture
def server(shop) -> KillableServer:  # noqa: F811 - the fixture
    """The first server."""
    return shop[0]


@pytest.fixture
def name(open_proxy, shop) -> Proxy:  # noqa: F811 - the fixture
    """A proxy as the name of the servers: `name.to(other.target)` is a change in DNS."""
    return open_proxy(shop[0].target)
