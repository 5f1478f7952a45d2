"""The lame duck of a stop, and a stop between the steps of the start."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.shops import SERVICE
from fixtures.waiting import WAIT_S
from rpcwheel.publisher import Publisher

DUBBO = "dubbo+zookeeper://127.0.0.1:2181"


@pytest.mark.parametrize(
    ("registries", "settings", "seconds"),
    [
        ("memory://", {}, 1.0),
        (DUBBO, {}, 10.0),
        (["memory://", DUBBO], {}, 10.0),
        (DUBBO, {"lame_duck": 0}, 0.0),
    ],
)
def test_consumers_of_dubbo_have_longer_to_learn_of_a_withdrawal(registries, settings, seconds):
    with ThreadPoolExecutor(1) as threads:
        publisher = Publisher(grpc.server(threads), registries, "shop.Orders", port=1, **settings)
        assert publisher._shutdown.lame_duck_s == seconds
        publisher.stop()


def test_a_stop_before_the_server_has_started_ends_it_too(
    world, make_world_shop, memory, monkeypatch
):
    """Otherwise a program that gets a signal then would wait for its end forever."""
    shop = make_world_shop()
    published = world.api.Publisher(shop.server, memory, SERVICE, port=0, lame_duck=0.05)
    begin_start = published._begin_start

    def begin_and_stop():
        begun = begin_start()
        published.begin_stop()
        return begun

    monkeypatch.setattr(published, "_begin_start", begin_and_stop)
    world.do(published.start)
    assert world.do(published.wait, WAIT_S)
    assert published.registrations == ()
    assert world.do(shop.server.wait_for_termination, WAIT_S) is False
