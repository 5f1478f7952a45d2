"""ZooKeeper without faults: nodes, nodes of others, watches and logins."""

import json
import logging

import pytest
from kazoo.security import make_acl, make_digest_acl

from fixtures.engine_watchers import RecordingWatcher, instance
from fixtures.ports import free_port
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import (
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.registry.backends.zookeeper_nodes import FULL_EVERY

A, B = instance(1), instance(2)


# Nodes


def test_an_instance_is_an_ephemeral_node_of_json(zookeeper, opened, namespace):
    opened(zookeeper.url(namespace=namespace)).publish([A])
    with zookeeper.operator() as operator:
        data, stat = operator.get(f"/{namespace}/v1/shop.Orders/10.0.0.1:1")
    assert json.loads(data)["host"] == "10.0.0.1"
    assert stat.ephemeralOwner
    assert data == A.encoded()


def test_a_lease_may_be_longer_than_the_longest_session(zookeeper, opened, namespace):
    backend = opened(zookeeper.url(namespace=namespace), lease=10**7)
    backend.publish([A])
    assert backend.renew([A]) == {}


def test_nodes_of_others_are_returned_unchanged_beside_ours(zookeeper, opened, namespace):
    backend, watcher = opened(zookeeper.url(namespace=namespace)), RecordingWatcher()
    parent = f"/{namespace}/v1/shop.Orders"
    with zookeeper.operator() as operator:
        operator.create(f"{parent}/junk", b"\xff\x00", makepath=True)
        operator.create(f"{parent}/parent/child", b"x", makepath=True)
        operator.create(f"{parent}/%zz", b"")
        hidden = [make_digest_acl("somebody", "else", all=True)]
        operator.create(f"{parent}/hidden", A.encoded(), acl=hidden)
    backend.publish([A])
    backend.watch(A.service, watcher)
    foreign = {"junk": b"\xff\x00", "parent": b"", "%zz": b"", "hidden": b""}
    assert backend.lookup(A.service).records == {A.id: A.encoded(), **foreign}
    assert watcher.sees(A, *foreign)
    backend.withdraw([instance(id=one) for one in ("junk", "parent", "%zz")])
    assert backend.lookup(A.service).records == {A.id: A.encoded(), **foreign}


def test_a_watch_reads_a_protected_node_that_was_replaced_in_one_transaction(
    zookeeper, opened, namespace
):
    backend, watcher = opened(zookeeper.url(namespace=namespace)), RecordingWatcher()
    path = f"/{namespace}/v1/shop.Orders/node"
    with zookeeper.operator() as operator:
        hidden = [make_digest_acl("somebody", "else", all=True)]
        operator.ensure_path(path.rpartition("/")[0])
        operator.create(path, b"hidden", acl=hidden)
        backend.watch(A.service, watcher)
        assert watcher.sees("node")
        replacement = operator.transaction()
        replacement.delete(path)
        replacement.create(path, A.encoded())
        assert replacement.commit() == [True, path]
    assert wait_until(lambda: watcher.views[-1].records == {"node": A.encoded()})


def test_a_node_of_another_with_our_name_is_replaced(zookeeper, opened, namespace):
    backend = opened(zookeeper.url(namespace=namespace))
    with zookeeper.operator() as operator:
        operator.create(f"/{namespace}/v1/shop.Orders/{A.id}", b"junk", makepath=True)
    backend.publish([A])
    assert backend.lookup(A.service).records == {A.id: A.encoded()}
    assert backend.renew([A]) == {}


def test_a_node_of_another_with_children_is_not_replaced(zookeeper, opened, namespace):
    backend = opened(zookeeper.url(namespace=namespace))
    with zookeeper.operator() as operator:
        operator.create(f"/{namespace}/v1/shop.Orders/{A.id}/x", b"", makepath=True)
    with pytest.raises(RegistryRefused, match=r"10\.0\.0\.1:1 is another's node"):
        backend.publish([A, B])
    assert B.id in backend.lookup(A.service).records


def test_after_a_change_of_one_node_only_that_one_is_read(zookeeper, opened, namespace):
    backend, watcher = opened(zookeeper.url(namespace=namespace), lease=300), RecordingWatcher()
    many = [instance(port) for port in range(1, 21)]
    backend.publish(many)
    backend.watch(A.service, watcher)
    assert watcher.sees(*many)
    assert wait_until(lambda: not backend._polling._running)
    before = _received(zookeeper)
    heavy = A.replace(weight=7)
    backend.publish([heavy])
    assert wait_until(lambda: watcher.views[-1].records[A.id] == heavy.encoded())
    asked = _received(zookeeper) - before
    assert asked < 10  # create, get, set and get again; not twenty


def test_a_view_says_which_record_changed(zookeeper, opened, namespace):
    publisher, watching = (opened(zookeeper.url(namespace=namespace)) for _ in "12")
    publisher.publish([A, B, odd := instance(id="%")])
    watching.watch(A.service, watcher := RecordingWatcher())
    assert watcher.sees(A, B, odd)
    for change in (
        lambda: publisher.publish([A.replace(weight=7)]),
        lambda: publisher.withdraw([odd]),
        lambda: publisher.publish([instance(3)]),
    ):
        before = watcher.views[-1]
        change()
        assert wait_until(lambda before=before: watcher.views[-1].records != before.records)
        view = watcher.views[-1]
        assert view.changed == {key for key, _ in before.records.items() ^ view.records.items()}
        assert len(view.changed) == 1


def test_a_renewal_of_nodes_that_have_not_changed_sends_no_requests_but_every_few_leases(
    zookeeper, opened, namespace
):
    backend = opened(zookeeper.url(namespace=namespace), lease=60)
    many = [instance(port) for port in range(1, 51)]
    backend.publish(many)
    assert backend.renew(many) == {}
    before = _received(zookeeper)
    for _ in range(5):
        assert backend.renew(many) == {}
    assert _received(zookeeper) - before < 10  # pings, and the request for this figure
    for _ in range(FULL_EVERY - 5):
        assert backend.renew(many) == {}
    assert _received(zookeeper) - before >= 50


def test_a_renewal_notices_nodes_that_vanish_or_are_replaced_after_one_before(
    zookeeper, opened, namespace
):
    backend, other = (opened(zookeeper.url(namespace=namespace)) for _ in "12")
    third = instance(3)
    backend.publish([A, B, third])
    with zookeeper.operator() as operator:
        for change in (
            lambda: operator.delete(f"/{namespace}/v1/shop.Orders/{A.id}"),
            lambda: operator.set(f"/{namespace}/v1/shop.Orders/{A.id}", b"broken"),
            lambda: other.publish([A]),
            lambda: other.publish([A.replace(epoch="another")]),
        ):
            for _ in range(2):
                assert backend.renew([A, B, third]) == {}
            change()
            assert wait_until(lambda: backend.renew([A, B, third]) == {A.key: "missing"})
            assert backend.renew([A, B, third]) == {A.key: "missing"}
            backend.publish([A])


def _received(engine) -> int:
    lines = engine.status().splitlines()
    return int(next(line for line in lines if "Received" in line).split()[1])


# Logins


def test_nodes_created_with_credentials_cannot_be_read_without_them(
    zookeeper, opened, namespace, caplog
):
    caplog.set_level(logging.DEBUG)
    logging.getLogger("kazoo").setLevel(logging.WARNING)  # the operator's own
    owner = opened(zookeeper.url(namespace=namespace, user="ann:sesame"))
    owner.publish([A])
    for login in ("", "ann:wrong"):
        other = opened(zookeeper.url(namespace=namespace, user=login))
        for ask in (
            lambda: other.publish([B]),  # noqa: B023 - called at once
            lambda: other.lookup(A.service),  # noqa: B023
            lambda: other.renew([A]),  # noqa: B023
            lambda: other.withdraw([A]),  # noqa: B023
        ):
            with pytest.raises(RegistryRefused, match="NoAuth") as refused:
                ask()
            assert "wrong" not in str(refused.value)
    assert owner.renew([A]) == {}
    assert opened(zookeeper.url(namespace=namespace, user="ann:sesame")).lookup(A.service).records
    assert "sesame" not in caplog.text
    assert "sesame" not in repr(owner.__dict__)
    assert "rpcwheel.registry.kazoo" in caplog.text


def test_existing_parents_need_no_right_to_create_them(zookeeper, opened, namespace):
    closed = [make_acl("world", "anyone", read=True, admin=True)]
    with zookeeper.operator() as operator:
        operator.create(f"/{namespace}")
        operator.create(f"/{namespace}/v1")
        operator.set_acls(f"/{namespace}", closed)
        backend = opened(zookeeper.url(namespace=namespace))
        backend.publish([A])
        assert backend.renew([A]) == {}
        operator.set_acls(f"/{namespace}/v1", closed)
        with pytest.raises(RegistryRefused, match="NoAuth"):
            backend.publish([A.replace(service="shop.Stock")])
        for path in ("/v1", ""):  # or the operator could not flush it
            operator.set_acls(f"/{namespace}{path}", [make_acl("world", "anyone", all=True)])


def test_a_watch_without_read_permission_is_suspect(zookeeper, opened, namespace):
    opened(zookeeper.url(namespace=namespace, user="ann:sesame")).publish([A])
    watcher = RecordingWatcher()
    opened(zookeeper.url(namespace=namespace)).watch(A.service, watcher)
    assert watcher.doubts()
    assert not watcher.views


def test_one_of_several_hosts_is_enough(zookeeper, opened):
    url = zookeeper.url().replace("//", f"//127.0.0.1:{free_port()},")
    backend = opened(url, timeout=WAIT_S)
    backend.publish([A])
    assert backend.renew([A]) == {}


def test_a_server_that_is_no_zookeeper_is_unavailable(listen, opened):
    nonsense = b"\0\0\0\x05HTTP/1.1 400 Bad Request\r\n\r\n" * 10
    listener = listen(lambda sock: sock.sendall(nonsense))
    backend = opened(f"zookeeper://127.0.0.1:{listener.port}", timeout=0.5)
    with pytest.raises(RegistryUnavailable):
        backend.lookup(A.service)
