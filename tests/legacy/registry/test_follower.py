"""A call that waits in vain to know who serves is told why nobody is known."""

import grpc
import pytest

from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cluster.policy import ClusterPolicy
from rpcwheel.registry.named import channel
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers.memory import MemoryProvider
from rpcwheel.registry.sync import FailbackRegistry
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import FlakyProvider


@pytest.mark.parametrize("balance", ["round_robin", "core"])
def test_the_first_call_of_a_channel_is_told_why_nothing_is_known_yet(memory, timer, balance):
    provider = FlakyProvider(MemoryProvider(parse_url(memory), Settings(2.0, 1.0)))
    provider.down("the cable is cut")
    settings = {"cluster": ClusterPolicy(wait=0.2), "timer": timer, "balance": balance}
    with (
        FailbackRegistry(provider) as registry,
        channel(SERVICE, registry=registry, **settings) as to_service,
    ):
        assert wait_until(lambda: timer.pending)  # whose time does not pass
        with pytest.raises(grpc.RpcError) as caught:
            to_service.unary_unary(WHO)(b"", timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        said = caught.value.details()
        assert said.startswith(f"no instance of {SERVICE} is known yet: ")
        assert said.endswith("the cable is cut")
        provider.up()
