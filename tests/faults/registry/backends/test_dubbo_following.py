"""Servers at Dubbo's application level are followed, in a real ZooKeeper."""

import contextlib
import json
import threading
from urllib.parse import quote_plus

import pytest

from fixtures.dubbo_applications import Nodes, local, metadata, remote, service
from fixtures.engine_watchers import RecordingWatcher, instance
from fixtures.engine_zookeeper import DubboEngine
from fixtures.ports import free_port
from fixtures.waiting import wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import Registry

ORDERS, STOCK = "com.example.shop.Orders", "com.example.shop.Stock"
SERVICE = "shop.Orders"
SHORT_S = 0.6
"""A lease, of which a third passes until missing metadata are looked up again."""


@pytest.fixture
def nodes(dubbo, root):
    with dubbo.operator() as operator:
        yield Nodes(operator, root)


@pytest.fixture
def follow(dubbo, opened, root):
    """Opens a backend that follows both levels, unless told otherwise."""

    def follow(*, lease=30.0, **options):
        return opened(dubbo.url(root=root, interface=ORDERS, **options), lease=lease)

    return follow


@pytest.fixture
def watched(follow):
    """Watches the service with a backend like `follow`."""

    def watched(name=SERVICE, **options):
        backend, watcher = follow(**options), RecordingWatcher()
        backend.watch(name, watcher)
        return watcher

    return watched


def read(records):
    """The instances of records that are valid, by id."""
    instances = {}
    for id_, data in records.items():
        with contextlib.suppress(ValueError):
            instances[id_] = ServiceInstance.decoded(data)
    return instances


def problem_of(record):
    with pytest.raises(ValueError, match=r".") as caught:
        ServiceInstance.decoded(record)
    return str(caught.value)


def test_a_server_whose_metadata_are_in_zookeeper_is_found(nodes, follow):
    nodes.map(ORDERS, "java-shop")
    nodes.start("java-shop", "10.0.0.1:1", remote("r1"))
    parameters = {"weight": "50", "dubbo.tag": "blue", "application": "java-shop"}
    orders = service(ORDERS, path=SERVICE, port=7, group="g1", version="1.2", params=parameters)
    nodes.keep("java-shop", "r1", metadata(orders, service(STOCK)))
    backend = follow()
    assert read(backend.lookup(SERVICE).records) == {
        "10.0.0.1:7,g1,1.2": ServiceInstance(
            service=SERVICE,
            host="10.0.0.1",
            port=7,
            id="10.0.0.1:7,g1,1.2",
            group="g1",
            version="1.2",
            weight=50,
            epoch="1795350893030",
            started_at=1795350893.03,
            metadata={
                "dubbo.application": "java-shop",
                "dubbo.interface": ORDERS,
                "dubbo.tag": "blue",
                "dubbo.warmup": "600000",
            },
        )
    }


def test_metadata_at_the_place_of_dubbo_go_are_found(nodes, follow):
    nodes.map(ORDERS, "go-shop")
    nodes.start("go-shop", "10.0.0.1:1", remote("1795350893"))
    nodes.start("go-shop", "1795350893", metadata(service(ORDERS)))  # below the application
    assert read(follow().lookup(SERVICE).records).keys() == {"10.0.0.1:1"}


def test_services_that_are_at_the_application_level_only_are_listed(nodes, follow):
    nodes.map(ORDERS, "java-shop")
    nodes.map(STOCK, "java-shop")
    nodes.map("com.example.shop.Old", "java-shop", "gone")
    nodes.keep("java-shop", "r1", metadata(service(ORDERS), service(STOCK)))
    backend = follow()
    assert backend.services() == []
    nodes.start("java-shop", "10.0.0.1:1", remote("r1"))
    assert backend.services() == [ORDERS, STOCK]


def test_each_change_is_seen(nodes, watched):
    watcher = watched()
    assert watcher.sees()
    nodes.map(ORDERS, "java-shop")
    nodes.start("java-shop", "10.0.0.1:1", remote("r1"))
    nodes.keep("java-shop", "r1", metadata(service(ORDERS)))
    assert wait_until(lambda: read(watcher.views[-1].records).keys() == {"10.0.0.1:1"})
    nodes.start("java-shop", "10.0.0.1:2", remote("r1", port=2))
    nodes.keep("go-shop", "r1", metadata(service(ORDERS)))
    nodes.start("go-shop", "10.0.0.2:1", remote("r1", host="10.0.0.2"))
    nodes.map(ORDERS, "java-shop", "go-shop")
    assert watcher.sees("10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1")
    nodes.stop("java-shop", "10.0.0.1:1")
    assert watcher.sees("10.0.0.1:2", "10.0.0.2:1")
    nodes.start("java-shop", "10.0.0.1:2", remote("0", port=2))
    assert watcher.sees("10.0.0.2:1")


def test_a_provider_that_keeps_its_metadata_is_asked_once_for_each_revision(
    nodes, follow, metadata_server
):
    nodes.map(ORDERS, "java-shop")
    nodes.map("shop.Stock", "java-shop")
    for port in (1, 2, 3):
        data = local("r1", metadata_server.port, port, **{"dubbo.tag": "blue"})
        nodes.start("java-shop", f"127.0.0.1:{port}", data)
    metadata_server.services = service(ORDERS), service("shop.Stock")
    backend, orders, stock = follow(), RecordingWatcher(), RecordingWatcher()
    backend.watch(SERVICE, orders)
    backend.watch("shop.Stock", stock)
    ids = [f"127.0.0.1:{port}" for port in (1, 2, 3)]
    assert orders.sees(*ids)
    assert stock.sees(*ids)
    assert backend.lookup(SERVICE).records == orders.views[-1].records
    assert metadata_server.asked == ["r1"]
    assert metadata_server.headers["tri-service-group"] == "java-shop"
    assert metadata_server.headers["tri-service-version"] == "2.0.0"
    metadata_server.services = (service("shop.Stock", params={"weight": "7"}),)
    nodes.start("java-shop", "127.0.0.1:2", local("r2", metadata_server.port, 2))
    assert orders.sees("127.0.0.1:1", "127.0.0.1:3")
    assert wait_until(lambda: read(stock.views[-1].records)["127.0.0.1:2"].weight == 7)
    assert metadata_server.asked == ["r1", "r2"]


def test_a_server_whose_metadata_are_not_known_does_not_hide_others(nodes, watched):
    nodes.map(ORDERS, "..", "a/b", "java-shop", "\0", "no such application")
    nodes.keep("java-shop", "broken", b"[]")
    nodes.start("java-shop", "10.0.0.1:7", remote("broken", port=7))
    nodes.keep("java-shop", "r1", metadata(service(ORDERS)))
    nodes.start("java-shop", "10.0.0.1:1", remote("r1"))
    nodes.start("java-shop", "10.0.0.1:2", remote("no such revision", port=2))
    nodes.start("java-shop", "127.0.0.1:3", local("r3", free_port(), 3))
    nodes.start("java-shop", "10.0.0.1:4", b"{}")
    nodes.start("java-shop", "10.0.0.1:5", b"\xff")
    dubbo = json.dumps({"protocol": "dubbo", "port": "20880"})
    other = {"dubbo.metadata-service.url-params": dubbo, "meta-v": "1.0.0"}
    nodes.start("java-shop", "127.0.0.1:6", local("r6", 1, 6, **other))
    watcher = watched()
    assert wait_until(lambda: watcher.views)
    records = watcher.views[-1].records
    assert read(records).keys() == {"10.0.0.1:1"}
    expected = {
        "10.0.0.1:2": "it has no metadata at",
        "127.0.0.1:3": "no metadata service of its revision answers: UNAVAILABLE",
        "10.0.0.1:4": "is no port",
        "10.0.0.1:5": "no JSON",
        "10.0.0.1:7": "can't be read: no JSON object",
        "127.0.0.1:6": "its metadata service has the protocol 'dubbo'",
    }
    for id_, text in expected.items():
        assert text in problem_of(records[id_])


def test_metadata_that_could_not_be_had_are_looked_up_again(nodes, watched, metadata_server):
    nodes.map(ORDERS, "java-shop")
    nodes.start("java-shop", "127.0.0.1:1", local("r1", metadata_server.port))
    watcher = watched(lease=SHORT_S)
    assert wait_until(lambda: metadata_server.asked)
    assert watcher.sees("127.0.0.1:1")
    assert "UNKNOWN: Internal Server Error" in problem_of(watcher.views[-1].records["127.0.0.1:1"])
    metadata_server.services = (service(ORDERS),)
    assert wait_until(lambda: read(watcher.views[-1].records))


def test_a_provider_that_does_not_answer_delays_no_other_service(
    nodes, follow, metadata_server, set_limit
):
    set_limit("registry.backends.dubbo_metadata.FIRST_WAIT_S", 0.01)
    nodes.map(ORDERS, "java-shop")
    nodes.start("java-shop", "127.0.0.1:1", local("r1", metadata_server.port))
    nodes.publish("shop.Stock", quote_plus("tri://10.0.0.2:1/shop.Stock"))
    metadata_server.answers.clear()
    metadata_server.services = (service(ORDERS),)
    backend, orders, stock = follow(), RecordingWatcher(), RecordingWatcher()
    backend.watch(SERVICE, orders)
    assert orders.sees("127.0.0.1:1")
    assert "has answered yet" in problem_of(orders.views[-1].records["127.0.0.1:1"])
    backend.watch("shop.Stock", stock)
    assert stock.sees("10.0.0.2:1")
    metadata_server.answers.set()
    assert wait_until(lambda: read(orders.views[-1].records))


def test_close_does_not_wait_for_a_provider_that_does_not_answer(nodes, follow, metadata_server):
    nodes.map(ORDERS, "java-shop")
    nodes.start("java-shop", "127.0.0.1:1", local("r1", metadata_server.port))
    metadata_server.answers.clear()
    backend = follow()
    backend.watch(SERVICE, RecordingWatcher())
    assert wait_until(lambda: metadata_server.asked)
    backend.close()

    def workers():
        return [each for each in threading.enumerate() if "rpcwheel-worker" in each.name]

    assert wait_until(lambda: not workers())
    assert not metadata_server.answers.is_set()


def test_a_server_at_both_levels_counts_once_and_needs_no_metadata(nodes, watched, metadata_server):
    nodes.map(ORDERS, "java-shop")
    nodes.start("java-shop", "127.0.0.1:1", local("r1", metadata_server.port))
    nodes.publish(ORDERS, quote_plus(f"tri://127.0.0.1:1/{SERVICE}?side=provider&weight=7"))
    watcher = watched()
    assert watcher.sees("127.0.0.1:1")
    assert read(watcher.views[-1].records)["127.0.0.1:1"].weight == 7
    assert metadata_server.asked == []


@pytest.mark.parametrize(
    ("level", "ids"), [("interface", {"10.0.0.1:1"}), ("application", {"10.0.0.2:1", "10.0.0.3:1"})]
)
def test_a_level_of_the_url_is_the_only_one_that_is_read(nodes, follow, level, ids):
    nodes.map(ORDERS, "java-shop", "py-shop")
    nodes.keep("java-shop", "r1", metadata(service(ORDERS)))
    nodes.start("java-shop", "10.0.0.2:1", remote("r1", host="10.0.0.2"))
    nodes.publish(ORDERS, quote_plus("tri://10.0.0.1:1/shop.Orders"))
    if level == "application":
        follow(application="py-shop").publish(
            [instance().replace(host="10.0.0.3", id="10.0.0.3:1")]
        )
    backend = follow(level=level)
    assert read(backend.lookup(SERVICE).records).keys() == ids
    assert backend.services() == [ORDERS]


def test_nothing_is_published_with_the_application_level_alone(dubbo):
    registry = Registry(dubbo.url(level="application"))
    with registry, pytest.raises(ConfigurationError, match="for reading only"):
        registry.register(instance())


@pytest.mark.parametrize(
    ("fault", "ids"),
    [
        ("wipe", ["10.0.0.2:1"]),
        ("restart", ["10.0.0.1:1", "10.0.0.2:1"]),
        ("freeze", ["10.0.0.1:1", "10.0.0.2:1"]),
    ],
)
def test_after_a_fault_of_zookeeper_servers_are_followed_again(opened, fault, ids):
    with DubboEngine() as engine:
        backend, watcher = opened(engine.url(root="eu"), lease=6, timeout=1), RecordingWatcher()
        backend.watch(SERVICE, watcher)

        def start(host):
            with engine.operator() as operator:
                nodes = Nodes(operator, "eu")
                nodes.map(SERVICE, "java-shop")
                nodes.keep("java-shop", "r1", metadata(service(SERVICE)))
                nodes.start("java-shop", f"{host}:1", remote("r1", host=host))

        start("10.0.0.1")
        assert watcher.sees("10.0.0.1:1")
        getattr(engine, fault)()
        assert watcher.doubts()
        if fault == "freeze":
            engine.thaw()
        start("10.0.0.2")
        assert watcher.sees(*ids)
