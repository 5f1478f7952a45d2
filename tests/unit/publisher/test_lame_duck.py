"""How long a server goes on serving after its withdrawal, unless the user says."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

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
