"""Fixtures of fault tests: servers that can be frozen, and clients of both worlds."""

from collections.abc import Iterator

import pytest

from fixtures.certificates import certificates  # noqa: F401 - fixtures
from fixtures.heartbeat_clients import open_client  # noqa: F401
from fixtures.proxy import Proxy, open_proxy  # noqa: F401
from fixtures.server_process import KillableServer, start_server  # noqa: F401


@pytest.fixture(scope="module")
def two_servers() -> Iterator[tuple[KillableServer, KillableServer]]:
    """Two servers for a module, as starting a process takes longer than most tests."""
    with KillableServer() as one, KillableServer() as other:
        yield one, other


@pytest.fixture
def shop(two_servers) -> Iterator[tuple[KillableServer, KillableServer]]:
    """The server that is frozen, and the one that replaces it."""
    yield two_servers
    for server in two_servers:
        server.cont()


@pytest.fixture
def server(shop) -> KillableServer:
    """The first server."""
    return shop[0]


@pytest.fixture
def name(open_proxy, shop) -> Proxy:  # noqa: F811 - the fixture
    """A proxy as the name of the servers: `name.to(other.target)` is a change in DNS."""
    return open_proxy(shop[0].target)
