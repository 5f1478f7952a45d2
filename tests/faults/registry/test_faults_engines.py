"""Registry engines that crash, freeze, lose their data or are cut off, under clients that call.

Three servers are called without a pause by name, on threads and on a loop, while the registry goes
away and comes back, and while what is to be published changes.
"""

import contextlib
import time

import pytest

from fixtures.engine_watchers import RecordingWatcher, in_the_end
from fixtures.fault_worlds import LEASE_ENDS_S, Load, World, running
from fixtures.programs import run_program
from fixtures.shops import SERVICE
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import open_registry
from rpcwheel.registry import ServiceInstance
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.registry.url import parse_url

STOCK = "shop.Stock"
"""Another service, which is not called."""

HEAVY = 700

ENGINES_AND_FAULTS = [
    ("etcd", "crash"),
    ("etcd", "freeze"),
    ("etcd", "cut off"),
    ("zookeeper", "wipe"),
    ("zookeeper", "freeze"),
    ("dubbo", "wipe"),
    ("dubbo", "freeze"),
    ("redis", "wipe"),
    ("redis", "flush"),
    ("sqlite", "lock"),
    ("sqlite", "vanish"),
]
"""Each fault, and each engine with one of its own; the tests of the backends have the rest."""

OF_LEASES = {"freeze", "cut off"}
"""Faults that last until the leases have ended."""


@pytest.fixture
def world(request, tmp_path):
    with running(request.param, tmp_path) as engine:
        yield World(engine, tmp_path)


@pytest.fixture
def opened(world):
    """Opens registries of the world; closed in the end, when the engine is there again."""
    with contextlib.ExitStack() as stack:
        yield lambda url=None, **settings: stack.enter_context(
            open_registry(url or world.url(), registry_policy=world.policy.replace(**settings))
        )


@pytest.fixture
def serve(opened, make_shop):
    """Starts three servers, each known by its name, and gives the registry that they are in."""

    def serve(**settings):
        registry = opened(**settings)
        for name in "abc":
            shop = make_shop(name)
            fields = {"service": SERVICE, "id": name, "host": "127.0.0.1", "port": shop.listen()}
            shop.server.start()
            registry.register(ServiceInstance(**fields), wait=WAIT_S)
        return registry

    return serve


def item(name, port=1, **others):
    return ServiceInstance(service=STOCK, id=name, host="10.0.0.1", port=port, **others)


def ids(snapshot):
    return {one.id for one in snapshot.instances}


def is_live(subscription, wanted):
    """Whether it has these, as the engine has them now."""
    snapshot = subscription.snapshot
    return snapshot is not None and snapshot.source == "live" and ids(snapshot) == wanted


def heavy(subscription):
    return {one.id for one in subscription.snapshot.instances if one.weight == HEAVY}


@pytest.mark.parametrize(
    ("world", "fault"),
    [pytest.param(engine, fault, id=f"{engine}-{fault}") for engine, fault in ENGINES_AND_FAULTS],
    indirect=["world"],
)
def test_after_a_fault_all_instances_are_published_and_no_call_has_failed(
    world, fault, opened, serve
):
    published = serve()
    for name in ("stays", "goes", "changes"):
        assert published.register(item(name)).wait_published(WAIT_S)
    subscriptions = [
        opened(url, stale_timeout=0.5).subscribe(STOCK) for url in (None, world.engine.url())
    ]
    for one in subscriptions:
        assert wait_until(lambda one=one: is_live(one, {"stays", "goes", "changes"}))
    load = Load.by_name(world.url(SERVICE), registry_policy=world.policy)
    with beside(world) as witness, load as calls:
        calls.goes_on()
        directory, files = world.snapshot, f"*/{SERVICE}.json"
        assert wait_until(lambda: any(b'"c"' in x.read_bytes() for x in directory.glob(files)))
        wanted_before = {one.instance.id: one for one in published.registrations}
        world.fail(fault)
        fails_at = time.monotonic()
        wanted_before["goes"].unregister()
        wanted_before["changes"].unregister()
        published.register(item("changes", weight=HEAVY))
        published.register(item("comes"))
        published.register(item("passes")).unregister()
        if fault != "flush":  # which is noticed at the next check
            new_clients_start_from_the_snapshot_files(world, opened)
            assert wait_until(lambda: not published.up)
        if fault in OF_LEASES:
            time.sleep(max(0.0, fails_at + LEASE_ENDS_S - time.monotonic()))
        calls.goes_on()
        world.end_fault(fault)

        wanted = {"stays", "changes", "comes"}
        assert wait_until(lambda: witness.views[-1].records.keys() == wanted)
        seen = len(witness.views)
        kept = {*"abc", *wanted}
        assert wait_until(lambda: {one.instance.id for one in published.registrations} == kept)
        for one in published.registrations:
            assert one.wait_published(WAIT_S)
        for one in subscriptions:
            assert wait_until(lambda one=one: is_live(one, wanted) and heavy(one) == {"changes"})
        assert calls.wait_for_answers_of(b"a", b"b", b"c")
        assert wait_until(lambda: published.up)
    assert not calls.failures
    assert not any("goes" in view.records for view in witness.views[seen:])  # it stays away
    for service, expected in ((STOCK, wanted), (SERVICE, set("abc"))):
        assert wait_until(
            lambda service=service, expected=expected: (
                in_the_end(lambda: world.held(service)).keys() == expected
            )
        )


@contextlib.contextmanager
def beside(world):
    """A watcher of the engine past the proxy, which keeps every view."""
    backend = open_backend(parse_url(world.engine.url()), Settings(2.0, 1.0))
    witness = RecordingWatcher()
    try:
        backend.watch(STOCK, witness)
        assert witness.sees("stays", "goes", "changes")
        yield witness
    finally:
        backend.close()


def new_clients_start_from_the_snapshot_files(world, opened):
    policy = world.policy.replace(timeout=0.9)  # of another session than those that run
    with Load.by_name(world.url(SERVICE), registry_policy=policy) as calls:
        calls.goes_on(1)
    for answers in calls.answers:
        assert set() < answers.keys() <= {b"a", b"b", b"c"}
    found = opened().lookup(SERVICE)
    assert found.source == "cache"
    assert set() < ids(found) <= {"a", "b", "c"}


@pytest.mark.parametrize("world", ["etcd"], indirect=True)
def test_a_process_that_starts_while_the_registry_is_down_uses_the_snapshot_files(world, serve):
    serve(lease_ttl=60.0)

    def start():
        return run_program(CLIENT, world.url(SERVICE), str(world.snapshot), str(WAIT_S))

    first = start()
    world.fail("crash")
    for output, errors in (first, start()):
        assert output == "a b c\na b c\n", errors
        assert "Traceback" not in errors  # that lookups fail is logged
    world.end_fault("crash")


CLIENT = """
import asyncio, sys, rpcwheel
from rpcwheel import aio

url, path, timeout = sys.argv[1:]
timeout = float(timeout)
settings = {"registry_policy": rpcwheel.RegistryPolicy(timeout=1.0, snapshot=path)}

def show(answers):
    print(*sorted({answer.decode() for answer in answers}))

with rpcwheel.insecure_channel(url, **settings) as channel:
    ask = channel.unary_unary("/shop.Orders/Who")
    show(ask(b"", timeout=timeout) for _ in range(12))

async def main():
    async with aio.insecure_channel(url, **settings) as channel:
        ask = channel.unary_unary("/shop.Orders/Who")
        show([await ask(b"", timeout=timeout) for _ in range(12)])

asyncio.run(main())
"""
"""The instances that it calls, with `grpc` and `grpc.aio`."""
