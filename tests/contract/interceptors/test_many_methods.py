"""The caches are bounded, as the clients of a proxy may send any method name."""

import gc
from collections import Counter
from types import SimpleNamespace

import pytest

from fixtures.client_interceptors import aio_interceptor, interceptor
from fixtures.worlds import AioWorld, SyncWorld
from rpcwheel import RetryPolicy
from rpcwheel.call import CallPolicy, DeadlinePolicy

MAX_METHODS = 100
NAMES = [f"/test.Invented/Method{number}" for number in range(600)]
MAX_OBJECTS = 400
"""How many objects of one type may be gained; fewer than one for each name."""

POLICY = CallPolicy(
    timeout=DeadlinePolicy(timeout=3600.0, slow_call_threshold=1800.0),
    retry=RetryPolicy(retry_on="UNAVAILABLE"),
    idempotent=True,
)


@pytest.fixture(autouse=True)
def small_caches(set_limit, call_counts):
    for module in ("call.config", "call.client_state"):
        set_limit(f"{module}.MAX_METHODS", MAX_METHODS)
    set_limit("interceptors.aio_client.MAX_METHODS", MAX_METHODS)
    set_limit("telemetry.call_counts.MAX_METHODS", MAX_METHODS)


def respond(*_):
    """Respond in place of a server."""
    return SimpleNamespace(result=bytes)


async def aio_respond(*_):
    return b""


def objects() -> Counter[str]:
    """Count the objects of each type."""
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


@pytest.mark.parametrize(
    ("world", "api"),
    [(SyncWorld, "interceptors"), (AioWorld, "interceptors"), (AioWorld, "channel")],
    indirect=["world"],
)
def test_clients_keep_a_bounded_number_of_methods(world, api):
    responder = interceptor(respond) if world.name == "sync" else aio_interceptor(aio_respond)
    if api == "interceptors":
        chain = [*world.do(world.interceptors.client_interceptors, POLICY), responder]
        channel = world.channel("127.0.0.1:1", interceptors=chain)
    else:
        bare = world.channel("127.0.0.1:1", interceptors=[responder])
        channel = world.do(world.interceptors.intercept_channel, bare, POLICY)

    before = objects()
    for name in NAMES:
        assert world.do(lambda name=name: channel.unary_unary(name)(b"")) == b""
    gained = objects() - before
    assert not {kind: count for kind, count in gained.items() if count > MAX_OBJECTS}
