"""The watches of services in ZooKeeper, with a client of the test in place of kazoo's."""

from types import SimpleNamespace

import pytest
from kazoo.protocol.states import EventType, KeeperState, WatchedEvent

from fixtures.engine_watchers import RecordingWatcher
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends.zookeeper import ZookeeperBackend
from rpcwheel.registry.url import parse_url

CHANGED = WatchedEvent(EventType.CHILD, KeeperState.CONNECTED, "/rpcwheel/v1/shop.Orders")


class Client:
    """A client of a server on which each service has no instances."""

    last_zxid = 1
    get_async = None

    def __init__(self):
        self.watches = []

    def get_children_async(self, path, watch):
        self.watches.append(watch)
        return SimpleNamespace(get=lambda timeout: [])


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def backend(client, timer, monkeypatch):
    backend = ZookeeperBackend(parse_url("zookeeper://127.0.0.1"), Settings(15, WAIT_S, timer))
    monkeypatch.setattr(backend._session, "client", lambda: client)
    yield backend
    backend.close()


def test_a_service_has_one_callback_until_its_watches_have_fired_and_are_closed(backend, client):
    watch = backend.watch("shop.Orders", RecordingWatcher())
    assert wait_until(lambda: len(client.watches) == 1)
    client.watches.pop()(CHANGED)
    assert wait_until(lambda: len(client.watches) == 1)
    client.watches[0](CHANGED)
    assert wait_until(lambda: len(client.watches) == 2)
    assert client.watches[0] is client.watches[1]
    watch.close()
    del watch  # its watcher keeps the views
    client.watches.clear()  # fired, or the session is over
    assert wait_until(lambda: not backend._watches)
