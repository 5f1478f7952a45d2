"""Real engines, broken in every way that they break, under a service that does not care.

One story for all engines and faults: three servers are called without a pause by name, on threads
and on a loop, while the registry goes away and comes back, and while what is to be published
changes.
"""

import contextlib
import subprocess
import sys
import time

import pytest

import rpcwheel
from fixtures.engine_watchers import Witness, in_the_end
from fixtures.fault_worlds import DOWN, FAULTS, SOON, Load, World, running
from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import ServiceInstance, aio, open_registry
from rpcwheel.observe import InstancePublished, add_sink, remove_sink
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers import open_provider
from rpcwheel.registry.url import parse_url

STOCK = "shop.Stock"
"""Another service, which nobody calls."""

HEAVY = 700

SERVERS = ["etcd", "zookeeper", "redis"]
STORIES = [
    *((engine, fault) for fault in list(FAULTS)[:5] for engine in SERVERS),
    *(("sqlite", fault) for fault in ("vanish", "lock", "flush")),
]


@pytest.fixture
def world(request, tmp_path):
    with running(request.param, tmp_path) as engine:
        yield World(engine, tmp_path)


@pytest.fixture
def fault(request):
    return request.param


@pytest.fixture
def opened(world):
    """Opens registries of the world; closed in the end, when the engine is there again."""
    with contextlib.ExitStack() as stack:
        yield lambda url=None, policy=world.policy: stack.enter_context(
            open_registry(url or world.url(), policy=policy)
        )


@pytest.fixture
def published(opened, make_shop):
    """The registry of the servers; three of them serve, each known by its name."""
    registry = opened()
    for name in "abc":
        shop = make_shop(name)
        told = {"service": SERVICE, "id": name, "host": "127.0.0.1", "port": shop.listen()}
        shop.server.start()
        registry.register(ServiceInstance(**told), wait=WAIT_S)
    return registry


def load(world):
    url = world.url(SERVICE)
    return Load(
        lambda: rpcwheel.channel(url, policy=world.policy),
        lambda: aio.channel(url, policy=world.policy),
    )


def item(name, port=1, **others):
    return ServiceInstance(service=STOCK, id=name, host="10.0.0.1", port=port, **others)


def ids(snapshot):
    return {one.id for one in snapshot.instances}


def settled(subscription, wanted):
    snapshot = subscription.snapshot
    return snapshot is not None and snapshot.source == "live" and ids(snapshot) == wanted


def heavy(subscription):
    return {one.id for one in subscription.snapshot.instances if one.weight == HEAVY}


@pytest.mark.parametrize(
    ("world", "fault"),
    [pytest.param(engine, fault, id=f"{engine}-{fault}") for engine, fault in STORIES],
    indirect=True,
)
def test_after_any_fault_all_is_published_as_it_is_wanted_now_and_no_call_fails_meanwhile(
    world, fault, opened, published
):
    stays, goes, changes = (published.register(item(name)) for name in ("stays", "goes", "changes"))
    assert all(one.wait_published(WAIT_S) for one in (stays, goes, changes))
    subscriptions = [opened(url).subscribe(STOCK) for url in (None, world.engine.url())]
    assert all(
        wait_until(lambda one=one: settled(one, {"stays", "goes", "changes"}))
        for one in subscriptions
    )
    with beside(world) as witness, load(world) as calls:
        calls.goes_on()
        assert wait_until(lambda: world.snapshot.exists() and b'"c"' in world.snapshot.read_bytes())
        world.fail(fault)
        fails_at = time.monotonic()
        goes.unregister()
        changes.unregister()
        published.register(item("changes", weight=HEAVY))
        published.register(item("comes"))
        published.register(item("passes")).unregister()
        if fault != "flush":
            serves_itself_from_the_file(world, opened)
            assert wait_until(lambda: not published.up)
            time.sleep(max(0.0, fails_at + DOWN - time.monotonic()))
        calls.goes_on()
        world.mend(fault)

        mended_at = time.monotonic()
        wanted = {"stays", "changes", "comes"}
        assert wait_until(lambda: witness.views[-1].records.keys() == wanted)
        seen = len(witness.views)
        assert time.monotonic() - mended_at < SOON
        kept = {*"abc", *wanted}
        assert wait_until(lambda: {one.instance.id for one in published.registrations} == kept)
        assert all(one.wait_published(WAIT_S) for one in published.registrations)
        for one in subscriptions:
            assert wait_until(lambda one=one: settled(one, wanted) and heavy(one) == {"changes"})
        assert calls.asks() == [{b"a", b"b", b"c"}] * 2
        assert published.up
    assert not calls.failures
    assert not any("goes" in view.records for view in witness.views[seen:])  # it stays away
    assert in_the_end(lambda: world.held(STOCK)).keys() == wanted
    assert in_the_end(lambda: world.held(SERVICE)).keys() == {"a", "b", "c"}


@contextlib.contextmanager
def beside(world):
    """Who looks at the engine past the proxy, and keeps every view."""
    provider = open_provider(parse_url(world.engine.url()), Settings(2.0, 1.0))
    witness = Witness()
    try:
        provider.watch(STOCK, witness)
        assert witness.sees("stays", "goes", "changes")
        yield witness
    finally:
        provider.close()


@pytest.mark.parametrize("world", ["etcd"], indirect=True)
def test_a_process_that_starts_while_the_registry_is_dead_calls_whom_an_earlier_one_saw(
    world, published
):
    def start():
        command = [sys.executable, "-P", "-W", "error", "-c", CLIENT]
        told = [world.url(SERVICE), str(world.snapshot)]
        return subprocess.run([*command, *told], capture_output=True, text=True, check=False)

    first = start()
    world.fail("crash")
    for ran in (first, start()):
        assert (ran.returncode, ran.stdout) == (0, "a b c\na b c\n"), ran.stderr
        assert "Traceback" not in ran.stderr  # that lookups fail is logged
    world.mend("crash")


CLIENT = """
import asyncio, sys, rpcwheel
from rpcwheel import aio

url, path = sys.argv[1:]
settings = {"policy": rpcwheel.RegistryPolicy(lease=1.0, timeout=1.0, snapshot=path)}

def show(answers):
    print(*sorted({answer.decode() for answer in answers}))

with rpcwheel.channel(url, **settings) as channel:
    ask = channel.unary_unary("/shop.Orders/Who")
    show(ask(b"", timeout=WAIT_S) for _ in range(12))

async def main():
    async with aio.channel(url, **settings) as channel:
        ask = channel.unary_unary("/shop.Orders/Who")
        show([await ask(b"", timeout=WAIT_S) for _ in range(12)])

asyncio.run(main())
"""
"""Whom it calls, in both worlds."""


@pytest.mark.parametrize("world", SERVERS, indirect=True)
def test_what_a_registry_has_forgotten_is_published_again_spread_over_the_jitter(world, opened):
    policy = world.policy.changed(lease=2.0, jitter=SPREAD, snapshot=False)
    registries = [opened(policy=policy) for _ in range(2)]
    with told_of(InstancePublished) as told:
        for number in range(24):
            registries[number % 2].register(item(f"i{number}"))
        assert wait_until(lambda: len({event.instance for _, event in told}) == 24, PATIENT)
        told.clear()
        world.fail("wipe")
        world.mend("wipe")
        assert wait_until(lambda: len({event.instance for _, event in told}) == 24, PATIENT)
    first = {event.instance: (at, event.again) for at, event in reversed(told)}
    assert {again for _, again in first.values()} <= {"wiped", "session", "lease"}
    times = [at for at, _ in first.values()]
    assert SPREAD / 10 < max(times) - min(times) < SPREAD + SOON
    assert wait_until(lambda: len(in_the_end(lambda: world.held(STOCK))) == 24)


PATIENT = 3 * WAIT_S
"""Seconds; two dozen sessions and a Java program, on a machine that has much else to do."""

SPREAD = 1.0
"""Seconds; at random they take nine tenths of it."""


@contextlib.contextmanager
def told_of(kind):
    """The events of a kind, with their times."""
    told = []

    def note(event):
        if isinstance(event, kind):
            told.append((time.monotonic(), event))

    add_sink(note)
    try:
        yield told
    finally:
        remove_sink(note)


def serves_itself_from_the_file(world, opened):
    """A client that starts now, without the registry."""
    policy = world.policy.changed(timeout=0.9)  # of another session than those that run
    with rpcwheel.channel(world.url(SERVICE), policy=policy) as to_service:
        assert to_service.unary_unary(WHO)(b"", timeout=WAIT_S) in {b"a", b"b", b"c"}
    found = opened().lookup(SERVICE)
    assert (ids(found), found.source) == ({"a", "b", "c"}, "cache")
