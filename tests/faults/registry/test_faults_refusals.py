"""Engines that refuse, that are not there, and that hold what others have put there.

Through `open_registry`, `channel` and `Kit.channel`, of both worlds.
"""

import contextlib
import json
import logging
import sqlite3
from functools import partial
from urllib.parse import quote_plus

import grpc
import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_redis import RedisEngine
from fixtures.engine_zookeeper import DubboEngine, ZookeeperEngine
from fixtures.fault_worlds import KINDS, Load, running
from fixtures.listeners import says, silent
from fixtures.ports import free_port
from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import WORLDS
from rpcwheel import Kit, RegistryPolicy, aio, open_registry
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.errors import NotPublished, RegistryRefused, RegistryUnavailable
from rpcwheel.events import RecordSkipped
from rpcwheel.registry import ServiceInstance

POLICY = RegistryPolicy(lease_ttl=60.0, timeout=WAIT_S / 2, snapshot=False)
"""To check a password costs an engine a while, on purpose."""

IMPATIENT = POLICY.replace(timeout=0.4)

ONE = ServiceInstance(service=SERVICE, host="10.0.0.1", port=1)
LONG = BalancerPolicy(pick_timeout=600)
"""Refusals are reported at once."""


def refusals(url, balancer, why, policy):
    """Call through a channel of each world until calls end with this reason; what they say."""
    return [refusal(kind(), url, balancer, why, policy) for kind in WORLDS.values()]


def refusal(world, url, balancer, why, policy):
    with contextlib.closing(world):
        if world.name == "sync":
            open_channel = world.keep(Kit(registry_policy=policy)).channel
        else:
            open_channel = partial(aio.insecure_channel, registry_policy=policy)
        channel = world.keep(world.do(open_channel, url, balancer_policy=balancer))
        while True:
            error = world.call(channel, method=WHO, timeout=WAIT_S).error()
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            if why in error.details():
                return error.details()


# Credentials


def locked(name):
    """An engine that lets in `bob:secret` alone, and what it says to others."""
    if name == "redis":
        return RedisEngine(
            "--user", "bob", "on", ">secret", "~*", "&*", "+@all", "--user", "default", "off"
        ), "invalid username-password pair"
    return (
        (EtcdEngine(), "authentication failed") if name == "etcd" else (ZookeeperEngine(), "NoAuth")
    )


@pytest.mark.parametrize("name", ["etcd", "zookeeper", "redis"])
def test_wrong_credentials_are_reported_at_once_and_valid_ones_still_work(name, caplog):
    caplog.set_level(logging.INFO, "rpcwheel")
    engine, why = locked(name)
    if isinstance(engine, RedisEngine):
        engine.login = {"username": "bob", "password": "secret"}
    with engine:
        if isinstance(engine, EtcdEngine):
            engine.require_login("bob", "secret", prefix="/rpcwheel/v1/")
        with open_registry(engine.url(user="bob:secret"), registry_policy=POLICY) as registry:
            registry.register(ONE, wait=WAIT_S)
            wrong = engine.url(SERVICE, user="bob:5esame")
            with open_registry(wrong, registry_policy=POLICY) as other:
                with pytest.raises(RegistryRefused, match=why):
                    other.lookup(SERVICE)
                with pytest.raises(RegistryRefused, match=why):
                    other.services()
                mine = other.register(ONE.replace(id="x"))
                assert wait_until(lambda: isinstance(mine.error, RegistryRefused))
                with pytest.raises(NotPublished, match=why) as refused:
                    other.register(mine.instance, wait=0.1)
                assert isinstance(refused.value.__cause__, RegistryRefused)
                with other.subscribe(SERVICE) as known, pytest.raises(NotPublished):
                    known.wait(0.2)
            said = refusals(wrong, LONG, why, POLICY)
            assert list(registry.lookup(SERVICE).instances) == [ONE]
    assert "5esame" not in caplog.text + str(refused.value) + repr(other) + "".join(said)
    assert "secret" not in caplog.text


# Nothing listens


STRANGER = says(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 9)
"""Answers everything in words of its own."""


@pytest.mark.parametrize(
    ("scheme", "talk"),
    [("etcd", silent), ("etcd", STRANGER), ("zookeeper", None), ("redis", STRANGER)],
)
def test_each_error_of_a_missing_engine_names_its_address(scheme, talk, listen):
    port = listen(talk).port if talk else free_port()
    url = f"{scheme}://127.0.0.1:{port}"
    with open_registry(url, registry_policy=IMPATIENT) as registry:
        registration = registry.register(ONE)
        with registry.subscribe(SERVICE) as known:
            with pytest.raises(RegistryUnavailable, match=f"127.0.0.1:{port}"):
                registry.lookup("shop.Stock")
            with pytest.raises(NotPublished, match=f"127.0.0.1:{port}"):
                known.wait(0.1)
            assert known.snapshot is None
        with pytest.raises(NotPublished, match=f"127.0.0.1:{port}") as late:
            registry.register(ONE, wait=0.1)
        assert wait_until(lambda: isinstance(registration.error, RegistryUnavailable))
        assert registration.state == "PENDING"
        assert not registry.up
        address = f"127.0.0.1:{port}"
        refusals(f"{url}/{SERVICE}", BalancerPolicy(pick_timeout=0.1), address, IMPATIENT)
    assert late.value.__cause__ is None or isinstance(late.value.__cause__, RegistryUnavailable)


# Foreign records


RECORD = json.loads(ONE.encoded())
FOREIGN = {
    "binary": b"\xff\x00\xfe",
    "empty": b"",
    "list": b"[1]",
    "number": b"7",
    "null": b"null",
    "deep": b"[" * 5000,
    "word": b'"up"',
    "old": b'{"host": "10.0.0.1", "port": 1}',
    "another": ONE.encoded(),
    "portless": json.dumps(RECORD | {"id": "portless", "port": 0}).encode(),
    "anywhere": json.dumps(RECORD | {"id": "anywhere", "host": "0.0.0.0"}).encode(),
    "heavy": json.dumps(RECORD | {"id": "heavy", "weight": 10**9}).encode(),
    "typeless": json.dumps(RECORD | {"id": "typeless", "port": "80"}).encode(),
}


FOREIGN_PROVIDERS = {
    quote_plus(url)
    for url in (
        "nonsense",
        "tri://10.0.0.1/shop.Orders",
        "dubbo://10.0.0.1:20880/shop.Orders?side=provider",
    )
}
"""Names of nodes in Dubbo's format, which has no other data."""


def plant(engine, service):
    """Put records there as an operator or a program does that knows nothing of us.

    Returns the keys of those that are to be skipped.
    """
    if isinstance(engine, DubboEngine):
        with engine.operator() as operator:
            for name in FOREIGN_PROVIDERS:
                operator.create(f"/dubbo/{service}/providers/{name}", makepath=True)
        return FOREIGN_PROVIDERS
    plant_records(engine, service, FOREIGN)
    return FOREIGN.keys()


def plant_records(engine, service, records):
    """Put records below the namespace of rpcwheel."""
    if isinstance(engine, EtcdEngine):
        for key, data in records.items():
            engine.put(f"/rpcwheel/v1/{service}/{key}", data)
        engine.put("/rpcwheel/v1/nothing", b"x")
        engine.put("/rpcwheel/v1/ spaced /x", b"x")
    elif isinstance(engine, ZookeeperEngine):
        with engine.operator() as operator:
            for key, data in records.items():
                operator.create(f"/rpcwheel/v1/{service}/{key}", data, makepath=True)
            operator.create(f"/rpcwheel/v1/{service}/parent/child", b"x", makepath=True)
            operator.create("/rpcwheel/v1/ spaced ", b"x")
    elif isinstance(engine, RedisEngine):
        pairs = [part for key, data in records.items() for part in (f"{service}/{key}", data)]
        pairs += [" spaced /x", "x", b"\xff/x", "x", "x", "x"]
        engine.ask("HSET", "{rpcwheel}:records", *pairs)
    else:
        rows = [("rpcwheel", service, key, data, "", "theirs") for key, data in records.items()]
        with contextlib.closing(sqlite3.connect(engine.path, timeout=WAIT_S)) as db, db:
            db.execute("INSERT INTO lease VALUES ('theirs', ?, ?)", (2**62, 2**62))
            db.executemany("INSERT INTO instance VALUES (?, ?, ?, ?, ?, ?)", rows)


@pytest.mark.parametrize("name", KINDS)
def test_unreadable_records_are_skipped_and_reported_and_the_others_are_called(
    name, tmp_path, make_shop, events, caplog
):
    shop = make_shop("a")
    good = ServiceInstance(service=SERVICE, id="good", host="127.0.0.1", port=shop.listen())
    shop.server.start()
    with (
        running(name, tmp_path) as engine,
        open_registry(engine.url(), registry_policy=POLICY) as registry,
        open_registry(engine.url(), registry_policy=POLICY) as other,
    ):
        registry.register(good, wait=WAIT_S)
        foreign = plant(engine, SERVICE)
        with registry.subscribe(SERVICE) as known:
            for found in (known.wait(WAIT_S), other.lookup(SERVICE)):
                assert [one.id for one in found.instances] == ["good"]
            assert wait_until(lambda: skipped(events) >= foreign)
            assert wait_until(lambda: "which is not a valid instance: ValueError" in caplog.text)
            with Load.by_name(engine.url(SERVICE), registry_policy=POLICY) as calls:
                assert calls.wait_for_answers_of(b"a")
            assert SERVICE in other.services()
            assert all(isinstance(service, str) for service in other.services())


def skipped(events):
    return {event.key for event in tuple(events) if isinstance(event, RecordSkipped)}
