"""Dubbo's format in a real ZooKeeper: nodes, nodes of others, watches and faults."""

import io
import json
import sys
import threading
from urllib.parse import quote_plus, unquote_plus

import pytest
from kazoo.security import OPEN_ACL_UNSAFE, make_acl

from fixtures.engine_watchers import RecordingWatcher, in_the_end, instance
from fixtures.interrupts import Interrupt
from fixtures.waiting import wait_until
from rpcwheel.cli import main
from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.instance import ServiceInstance

A = instance(1)
B = A.replace(host="10.0.0.2", id="10.0.0.2:1")
INTERFACE = "com.example.shop.Orders"
READ_ACL = [make_acl("world", "anyone", read=True, admin=True)]


def nodes(operator, root, interface):
    """The URLs of the providers."""
    names = operator.get_children(f"/{root}/{interface}/providers")
    return {unquote_plus(name) for name in names}


def test_an_instance_is_an_ephemeral_node_below_its_interface(dubbo, opened, root):
    backend = opened(dubbo.url(root=root, interface=INTERFACE, application="py-shop"))
    backend.publish([A])
    with dubbo.operator() as operator:
        (name,) = operator.get_children(f"/{root}/{INTERFACE}/providers")
        _, stat = operator.get(f"/{root}/{INTERFACE}/providers/{name}")
    assert stat.ephemeralOwner
    url = unquote_plus(name)
    assert url.startswith("tri://10.0.0.1:1/shop.Orders?application=py-shop&")
    assert f"&interface={INTERFACE}&" in url
    assert backend.lookup(A.service).records == {A.id: A.encoded()}
    assert backend.renew([A]) == {}


def test_each_interface_belongs_to_the_service_with_the_same_last_part(dubbo, opened, root):
    backend = opened(dubbo.url(root=root, interface=f"{INTERFACE},com.example.shop.Stock"))
    stock, cart = A.replace(service="shop.Stock"), A.replace(service="shop.Cart")
    backend.publish([A, stock, cart])
    assert backend.services() == ["com.example.shop.Orders", "com.example.shop.Stock", "shop.Cart"]
    assert backend.lookup("shop.Stock").records == {A.id: stock.encoded()}
    by_interface = ServiceInstance.decoded(backend.lookup(INTERFACE).records[A.id])
    assert by_interface.metadata == {"dubbo.path": "shop.Orders"}


def test_the_service_of_the_url_is_listed_instead_of_its_interface(dubbo, opened, root):
    backend = opened(dubbo.url("shop.Orders", root=root, interface=INTERFACE))
    backend.publish([A])
    assert backend.services() == ["shop.Orders"]


def test_a_change_replaces_the_node_in_one_step(dubbo, opened, root):
    publisher, watching = opened(dubbo.url(root=root)), opened(dubbo.url(root=root))
    publisher.publish([A])
    watching.watch(A.service, watcher := RecordingWatcher())
    assert watcher.sees(A)
    for weight in range(1, 20):
        publisher.publish([A.replace(weight=weight)])
    assert wait_until(lambda: watcher.views[-1].records == {A.id: A.replace(weight=19).encoded()})
    assert set(watcher.news) == {frozenset({A.id})}


def test_the_node_of_a_java_provider_at_the_same_address_is_replaced(dubbo, opened, root):
    backend, watcher = opened(dubbo.url(root=root)), RecordingWatcher()
    backend.watch(A.service, watcher)
    before = quote_plus("tri://10.0.0.1:1/shop.Orders?side=provider&timestamp=1")
    other = quote_plus("tri://10.0.0.2:1/shop.Orders?side=provider&timestamp=1")
    with dubbo.operator() as operator:
        for name in (before, other):
            operator.create(f"/{root}/shop.Orders/providers/{name}", b"10.0.0.9", makepath=True)
        assert watcher.sees("10.0.0.1:1", "10.0.0.2:1")
        backend.publish([A])
        assert wait_until(lambda: watcher.views[-1].records[A.id] == A.encoded())
        assert len(nodes(operator, root, "shop.Orders")) == 2
        backend.withdraw([A.replace(epoch="another")])
        assert backend.renew([A]) == {}
        backend.withdraw([A])
        assert watcher.sees("10.0.0.2:1")


def test_a_provider_of_another_protocol_is_a_record_that_says_so(dubbo, opened, root):
    backend = opened(dubbo.url(root=root))
    name = quote_plus("dubbo://10.0.0.1:20880/shop.Orders?side=provider")
    with dubbo.operator() as operator:
        operator.create(f"/{root}/shop.Orders/providers/{name}", makepath=True)
    ((key, record),) = backend.lookup(A.service).records.items()
    assert key == name
    with pytest.raises(ValueError, match="its protocol is 'dubbo'; only Triple"):
        ServiceInstance.decoded(record)


def renewed(backend, operator, path):
    """Whether a server is listed again after a renewal, which reports no loss."""
    assert backend.renew([A]) == {}
    return operator.exists(path)


def test_a_server_is_listed_at_the_application_level(dubbo, opened, root):
    application = f"app-{root}"
    stock = A.replace(service="shop.Stock", group="g1", version="1.2")
    options = {"interface": INTERFACE, "application": application}
    backend, other = (opened(dubbo.url(root=root, **options)) for _ in "12")
    with dubbo.operator() as operator:
        operator.create(f"/{root}/mapping/{INTERFACE}", b"java-shop", makepath=True)
        backend.publish([A, stock])
        other.publish([B])
        server = json.loads(operator.get(f"/{root}/{application}/10.0.0.1:1")[0])
        assert (
            operator.get(f"/{root}/mapping/{INTERFACE}")[0].decode() == f"java-shop,{application}"
        )
        assert operator.get(f"/{root}/mapping/shop.Stock")[0].decode() == application
        revision = server["payload"]["metadata"]["dubbo.metadata.revision"]
        metadata = json.loads(operator.get(f"/{root}/metadata/{application}/{revision}")[0])
        assert metadata["app"] == application
        assert metadata["revision"] == revision
        assert set(metadata["services"]) == {f"{INTERFACE}:tri", "g1/shop.Stock:1.2:tri"}
        orders = metadata["services"][f"{INTERFACE}:tri"]
        assert (orders["path"], orders["port"]) == ("shop.Orders", 1)
        assert backend.renew([A, stock]) == {}
        operator.delete(f"/{root}/{application}/10.0.0.1:1")
        assert wait_until(lambda: renewed(backend, operator, f"/{root}/{application}/10.0.0.1:1"))
        backend.publish([A.replace(status="DRAINING")])
        server = json.loads(operator.get(f"/{root}/{application}/10.0.0.1:1")[0])
        assert server["payload"]["metadata"]["dubbo.metadata.revision"] != revision
        backend.withdraw([A, stock])
        assert operator.get_children(f"/{root}/{application}") == ["10.0.0.2:1"]


def test_a_renewal_that_failed_is_repeated_at_the_application_level(dubbo, opened, root):
    mapping, application = f"/{root}/mapping", f"app-{root}"
    path = f"/{root}/{application}/10.0.0.1:1"
    backend = opened(dubbo.url(root=root, application=application))
    backend.publish([A])
    with dubbo.operator() as operator:
        assert renewed(backend, operator, path)
        operator.delete(f"{mapping}/{A.service}")
        operator.set_acls(mapping, READ_ACL)
        operator.delete(path)
        with pytest.raises(RegistryRefused):
            wait_until(lambda: renewed(backend, operator, path))
        operator.set_acls(mapping, OPEN_ACL_UNSAFE)
        assert renewed(backend, operator, path)


def test_a_withdrawal_that_failed_is_repeated_at_the_application_level(dubbo, opened, root):
    application, proxy = f"app-{root}", dubbo.proxy()
    url = dubbo.url(port=proxy.port, root=root, application=application)
    backend = opened(url, lease=60, timeout=0.5)
    in_the_end(lambda: backend.publish([A]))
    proxy.blackhole()
    with pytest.raises(RegistryUnavailable):
        backend.withdraw([A])
    proxy.heal()
    in_the_end(lambda: backend.withdraw([A]))
    with dubbo.operator() as operator:
        assert operator.get_children(f"/{root}/{application}") == []


def test_metadata_are_written_for_dubbo_go_too_below_the_default_root(dubbo, opened, root):
    application = f"app-{root}"
    servers = [one.replace(service=f"shop.{root}") for one in (A, B)]  # differ in their host
    opened(dubbo.url(application=application)).publish(servers)
    with dubbo.operator() as operator:
        (revision,) = operator.get_children(f"/dubbo/metadata/{application}")
        places = [f"/dubbo/metadata/{application}/{revision}", f"/dubbo/{application}/{revision}"]
        first, second = (operator.get(place)[0] for place in places)
    assert first == second


def test_processes_that_share_a_port_do_not_fight_for_their_node(dubbo, opened, root):
    application = f"app-{root}"
    first, second = (opened(dubbo.url(root=root, application=application)) for _ in "12")
    same = A.replace(id="worker-2", epoch="another")
    first.publish([A])
    second.publish([same])
    assert first.renew([A]) == second.renew([same]) == {}
    second.withdraw([same])
    with dubbo.operator() as operator:
        assert wait_until(lambda: renewed(first, operator, f"/{root}/{application}/10.0.0.1:1"))


def test_the_interface_level_alone_lists_no_application(dubbo, opened, root):
    application = f"app-{root}"
    backend = opened(dubbo.url(root=root, application=application, level="interface"))
    backend.publish([A])
    with dubbo.operator() as operator:
        assert not operator.exists(f"/{root}/{application}")
        assert operator.get_children(f"/{root}") == ["shop.Orders"]


# Consumers


def consumer_node(root, interface, application):
    """The path of the node of a client of Dubbo."""
    url = f"consumer://10.0.0.9/{interface}?application={application}&version=1.2&side=consumer"
    return f"/{root}/{interface}/consumers/{quote_plus(url)}"


@pytest.fixture
def consumer(dubbo, root):
    """Registers a client of Dubbo until the end of the test; returns the path of its node."""
    with dubbo.operator() as operator:

        def register(interface, application):
            path = consumer_node(root, interface, application)
            operator.create(path, ephemeral=True, makepath=True)
            return path

        yield register


def test_consumers_are_those_of_the_named_services_or_all(dubbo, opened, root, consumer):
    backend = opened(dubbo.url("shop.Orders", root=root, interface=INTERFACE))
    assert backend.consumers() == backend.consumers(["shop.Orders"]) == []
    for interface, application in ((INTERFACE, "web"), (INTERFACE, "app"), ("shop.Cart", "web")):
        consumer(interface, application)
    expected = [
        *(("shop.Cart", "web"), ("shop.Orders", "app"), ("shop.Orders", "web")),
    ]
    for services, count in ((None, 3), (["shop.Orders", "shop.Stock"], 2)):
        seen = [(each.service, each.application) for each in backend.consumers(services)]
        assert sorted(seen) == seen == expected[-count:]


def test_ls_shows_consumers_also_of_a_service_without_servers(dubbo, root, consumer, capsys):
    consumer(INTERFACE, "web")
    url = dubbo.url(root=root)
    assert main(["registry", "ls", url]) == 0
    head, row, *_, summary = capsys.readouterr().out.splitlines()
    assert head.split() == ["CONSUMER", "OF", "APPLICATION", "HOST", "VERSION", "UP", "SINCE"]
    assert row.split() == [INTERFACE, "web", "10.0.0.9", "1.2"]
    assert summary.startswith("no service and 1 consumer at ")
    assert main(["registry", "ls", url, INTERFACE, "--json"]) == 1
    (shown,) = json.loads(capsys.readouterr().out)["consumers"]
    assert (shown["service"], shown["application"]) == (INTERFACE, "web")


def test_watch_shows_consumers_that_come_and_go(dubbo, root, consumer, monkeypatch, set_limit):
    set_limit("cli.registry.CONSUMERS_INTERVAL_S", 0.0)
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    consumer(INTERFACE, "web")

    def change():
        with dubbo.operator() as operator:
            try:
                wait_until(lambda: "consumer web at 10.0.0.9 present" in printed.getvalue())
                path = consumer(INTERFACE, "app")
                wait_until(lambda: "consumer app at 10.0.0.9 added" in printed.getvalue())
                operator.delete(path)
                wait_until(lambda: "consumer app at 10.0.0.9 removed" in printed.getvalue())
            finally:
                ctrl_c.send()

    with Interrupt() as ctrl_c:
        thread = threading.Thread(target=change)
        thread.start()
        assert main(["registry", "watch", dubbo.url(root=root), INTERFACE]) == 130
        thread.join()
    lines = printed.getvalue().splitlines()
    assert [line for line in lines if "consumer" in line] == [
        f"= {INTERFACE} consumer web at 10.0.0.9 present: version 1.2",
        f"+ {INTERFACE} consumer app at 10.0.0.9 added: version 1.2",
        f"- {INTERFACE} consumer app at 10.0.0.9 removed: version 1.2",
    ]
