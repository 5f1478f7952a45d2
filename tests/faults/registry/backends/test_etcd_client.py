"""The etcd client: URLs, members of a cluster, logins and errors."""

import grpc
import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_watchers import RecordingWatcher, in_the_end, instance
from fixtures.grpc_servers import GrpcServer
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryRefused, RegistryUnavailable

SERVICE = "shop.Orders"
NO_ANSWER = r"no answer in \d+ s|ping timeout"
"""On a connection into a black hole. The second is gRPC's, after 13 s without a byte."""


@pytest.fixture
def guarded():
    """An etcd with authentication; `bob:secret` has all rights in the namespace `bobs`."""
    with EtcdEngine("--bcrypt-cost", "4") as engine:
        engine.require_login("bob", "secret", prefix="/bobs/")
        yield engine


# Members


def test_the_error_without_a_server_has_the_url_without_the_password(opened) -> None:
    backend = opened("etcd://bob:secret@127.0.0.1:1/shop")
    with pytest.raises(RegistryUnavailable, match=r"etcd://bob:\*\*\*@127\.0\.0\.1:1: ") as failed:
        backend.lookup(SERVICE)
    assert "secret" not in str(failed.value)
    assert failed.type is RegistryUnavailable


def test_a_grpc_server_that_is_no_etcd_is_refused(opened) -> None:
    with GrpcServer() as server:
        backend = opened(f"etcd://{server.target}")
        with pytest.raises(RegistryRefused, match="no etcd"):
            backend.lookup(SERVICE)
        backend.close()  # first, or gRPC would log the refusal at the end


def test_one_of_several_members_is_enough(etcd, opened, namespace) -> None:
    for _ in range(4):  # each begins with any of them
        hosts = f"127.0.0.1:1,127.0.0.1:2,127.0.0.1:{etcd.port}"
        backend = opened(f"etcd://{hosts}?namespace={namespace}")
        watcher = RecordingWatcher()
        backend.watch(SERVICE, watcher)
        in_the_end(lambda backend=backend: backend.publish([instance()]))
        assert backend.renew([instance()]) == {}
        assert watcher.sees(instance())


def test_a_request_goes_to_the_next_member_within_its_timeout_if_one_is_down(
    etcd, opened, namespace
) -> None:
    for port in range(1, 9):  # each begins with any of them
        hosts = f"127.0.0.1:1,127.0.0.1:2,127.0.0.1:{etcd.port}"
        backend = opened(f"etcd://{hosts}?namespace={namespace}-{port}")
        backend.publish([instance(port)])
        assert backend.renew([instance(port)]) == {}
    for _ in range(8):
        backend = opened(f"etcd://127.0.0.1:1,127.0.0.1:{etcd.port}?namespace={namespace}-1")
        assert list(backend.lookup(SERVICE).records) == [instance(1).id]


def two_proxies_and_a_backend(etcd, opened, namespace):
    """A backend with two addresses, and the proxies behind them: the one in use comes first."""
    proxies = [etcd.proxy(), etcd.proxy()]
    hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
    url = f"etcd://{hosts}?namespace={namespace}"
    backend = opened(url, timeout=WAIT_S)  # one member gets half of it
    backend.publish([instance(1)])
    proxies.sort(key=lambda proxy: -proxy.connections)
    return *proxies, backend


def test_a_lookup_goes_to_the_next_member_within_its_timeout_if_one_is_silent(
    etcd, opened, namespace
) -> None:
    used, other, backend = two_proxies_and_a_backend(etcd, opened, namespace)
    used.blackhole(new=True)
    assert list(backend.lookup(SERVICE).records) == [instance(1).id]
    assert (used.connections, other.connections) == (1, 1)


def test_a_publish_without_an_answer_is_not_sent_to_another_member(etcd, opened, namespace) -> None:
    """The first member could apply it after a later request, such as a withdrawal."""
    used, _, backend = two_proxies_and_a_backend(etcd, opened, namespace)
    used.blackhole()
    with pytest.raises(RegistryUnavailable, match=NO_ANSWER):
        backend.publish([instance(2)])
    assert list(in_the_end(lambda: backend.lookup(SERVICE)).records) == [instance(1).id]


# Logins


def test_a_login_is_repeated_when_etcd_has_forgotten_the_token(guarded, opened) -> None:
    backend = opened(guarded.url(user="bob:secret", namespace="bobs"))
    watcher = RecordingWatcher()
    backend.watch(SERVICE, watcher)
    backend.publish([instance(1)])
    assert watcher.sees(instance(1))
    guarded.restart()  # tokens are not kept, but leases and keys
    assert in_the_end(lambda: backend.renew([instance(1)])) == {}
    backend.publish([instance(2)])
    assert watcher.sees(instance(1), instance(2))


def test_a_watch_can_be_added_after_the_token_of_the_stream_became_invalid(guarded, opened) -> None:
    backend = opened(guarded.url(user="bob:secret", namespace="bobs"))
    first, second = RecordingWatcher(), RecordingWatcher()
    backend.watch(SERVICE, first)
    assert first.sees()
    guarded.ask("auth/user/changepw", name="bob", password="secret")  # voids all tokens
    backend.watch("shop.Carts", second)
    assert second.sees()


def test_wrong_passwords_missing_logins_and_missing_rights_are_refused(guarded, opened) -> None:
    for user, namespace, why in (
        ("bob:wrong", "bobs", "authentication failed"),
        ("", "bobs", "it wants a login"),
        ("bob:secret", "others", "permission denied"),
    ):
        backend = opened(guarded.url(user=user, namespace=namespace))
        watcher = RecordingWatcher()
        backend.watch(SERVICE, watcher)
        with pytest.raises(RegistryRefused, match=why):
            backend.publish([instance()])
        with pytest.raises(RegistryRefused, match=why):
            backend.lookup(SERVICE)
        assert watcher.doubts()
        assert all(isinstance(news, str) for news in watcher.news)


def test_a_watch_without_permission_affects_no_other(guarded, opened) -> None:
    guarded.ask("auth/role/grant", name="publisher", perm=guarded.right("/mixed/v1/shop.Orders/"))
    backend = opened(guarded.url(user="bob:secret", namespace="mixed"), lease=1.0)
    denied, allowed = RecordingWatcher(), RecordingWatcher()
    backend.watch("shop.Secrets", denied)
    backend.watch(SERVICE, allowed)
    backend.publish([instance()])
    assert allowed.sees(instance())
    assert denied.doubts()
    assert not allowed.after_doubt
    guarded.ask("auth/role/grant", name="publisher", perm=guarded.right("/mixed/v1/shop.Secrets/"))
    assert denied.sees()


def test_a_login_is_made_when_authentication_is_enabled_later(opened) -> None:
    with EtcdEngine("--bcrypt-cost", "4") as etcd:
        backend = opened(etcd.url(user="bob:secret", namespace="bobs"))
        backend.publish([instance()])
        etcd.require_login("bob", "secret", prefix="/bobs/")
        assert backend.renew([instance()]) == {}


# Connections


def test_a_watch_stream_requires_a_leader(opened) -> None:
    metadata = []

    def watch(requests, context):
        metadata.append(dict(context.invocation_metadata()))
        yield from ()

    handler = grpc.stream_stream_rpc_method_handler(watch)
    service = grpc.method_handlers_generic_handler("etcdserverpb.Watch", {"Watch": handler})
    with GrpcServer(service) as server:
        backend = opened(f"etcd://{server.target}")
        backend.watch(SERVICE, RecordingWatcher())
        assert wait_until(lambda: metadata)
        backend.close()
    assert metadata[0]["hasleader"] == "true"  # as etcd's own client does, WithRequireLeader


def test_the_connection_stays_open_when_the_last_watch_is_closed(etcd, opened, namespace) -> None:
    with etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port, namespace=namespace))
        for port in range(1, 4):
            watcher = RecordingWatcher()
            watch = backend.watch(SERVICE, watcher)
            assert wait_until(lambda watcher=watcher: watcher.news)
            watch.close()
            backend.publish([instance(port)])
        assert proxy.accepted == 1


def test_a_connection_into_a_black_hole_is_replaced(etcd, opened, namespace) -> None:
    with etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port, namespace=namespace), lease=60.0, timeout=5.0)
        watcher = RecordingWatcher()
        backend.watch(SERVICE, watcher)  # keeps the old one, as no probe is due
        in_the_end(lambda: backend.publish([instance()]))
        assert watcher.sees(instance())
        proxy.blackhole()
        with pytest.raises(RegistryUnavailable, match=NO_ANSWER):
            backend.renew([instance()])
        assert backend.renew([instance()]) == {}
        backend.close()
        proxy.heal()
        assert wait_until(lambda: proxy.connections == 0)
