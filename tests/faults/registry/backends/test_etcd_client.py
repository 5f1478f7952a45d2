"""How etcd is reached: URLs, TLS, logins, and what its errors mean."""

import time
from concurrent import futures

import grpc
import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_watchers import RecordingWatcher, in_the_end, instance
from fixtures.waiting import wait_until
from rpcwheel.errors import ConfigurationError, RegistryRefused, RegistryUnavailable
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.registry.backends.etcd_client import messages

SERVICE = "shop.Orders"


@pytest.fixture
def guarded():
    """An etcd that wants a login; `bob:secret` may do everything in the namespace `bobs`."""
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    with EtcdEngine("--bcrypt-cost", "4") as engine:
        engine.require_login("bob", "secret", prefix="/bobs/")
        yield engine


# URLs


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("etcd:///shop.Orders", "the host is missing"),
        ("etcd://bob@10.0.0.1", "user and password go together"),
        ("etcd://10.0.0.1?color=red", "there is no option 'color'"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_at_once(url, why) -> None:
    with pytest.raises(ConfigurationError, match=why):
        open_backend(url, Settings(2.0, 1.0))


# What answers, and what does not


def test_nobody_on_the_port_is_told_with_the_place_and_without_the_password(opened) -> None:
    backend = opened("etcd://bob:secret@127.0.0.1:1/shop")
    with pytest.raises(RegistryUnavailable, match=r"etcd://bob:\*\*\*@127\.0\.0\.1:1: ") as told:
        backend.lookup(SERVICE)
    assert "secret" not in str(told.value)


def test_a_grpc_server_that_is_no_etcd_is_told_as_such(opened) -> None:
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        backend = opened(f"etcd://127.0.0.1:{port}")
        with pytest.raises(RegistryRefused, match="no etcd"):
            backend.lookup(SERVICE)
        backend.close()  # first, or gRPC would log what it is told at the end
        server.stop(None).wait()


def test_one_of_several_members_that_answers_is_enough(opened) -> None:
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    with EtcdEngine() as etcd:
        for _ in range(4):  # each begins with any of them
            backend = opened(f"etcd://127.0.0.1:1,127.0.0.1:2,127.0.0.1:{etcd.port}")
            witness = RecordingWatcher()
            backend.watch(SERVICE, witness)
            in_the_end(lambda backend=backend: backend.publish([instance()]))
            assert backend.renew([instance()]) == {}
            assert witness.sees(instance())


def test_a_request_goes_to_the_next_member_within_its_time_if_one_is_down(opened) -> None:
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    with EtcdEngine() as etcd:
        for port in range(1, 9):  # each begins with any of them
            backend = opened(
                f"etcd://127.0.0.1:1,127.0.0.1:2,127.0.0.1:{etcd.port}?namespace=n{port}"
            )
            backend.publish([instance(port)])
            assert backend.renew([instance(port)]) == {}
        for _ in range(8):
            backend = opened(f"etcd://127.0.0.1:1,127.0.0.1:{etcd.port}?namespace=n1")
            assert list(backend.lookup(SERVICE).records) == [instance(1).id]


def test_a_request_goes_to_the_next_member_within_its_time_if_one_is_silent(opened) -> None:
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    with EtcdEngine() as etcd, etcd.proxy() as proxy:
        proxy.blackhole(new=True)
        url = f"etcd://127.0.0.1:{proxy.port},127.0.0.1:{etcd.port}"
        for _ in range(2):
            backend = opened(url, timeout=1.0)
            backend._client._turn = 0
            assert backend.lookup(SERVICE).records == {}
            assert proxy.accepted


def test_what_was_certainly_not_sent_may_be_carried_out_by_another_member(opened) -> None:
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    with EtcdEngine() as etcd:
        client = opened(f"etcd://127.0.0.1:1,127.0.0.1:{etcd.port}")._client
        client._turn = 0
        assert client.ask("KV/Txn", messages().TxnRequest(), once=True).succeeded


def test_what_may_have_been_published_by_a_silent_member_is_not_published_by_another(
    opened,
) -> None:
    """It could be carried out by the first one after what comes later, a withdrawal."""
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    with EtcdEngine() as etcd, etcd.proxy() as proxy:
        url = f"etcd://127.0.0.1:{proxy.port},127.0.0.1:{etcd.port}"
        backend = opened(url, timeout=1.0, lease=60.0)
        backend._client._turn = 0
        backend.publish([instance(1)])
        proxy.blackhole()
        with pytest.raises(RegistryUnavailable, match="no answer"):
            backend.publish([instance(2)])
        assert list(backend.lookup(SERVICE).records) == [instance(1).id]


# Logins


def test_with_a_login_everything_works_also_after_etcd_has_forgotten_the_token(
    guarded, opened
) -> None:
    backend = opened(guarded.url(user="bob:secret", namespace="bobs"))
    witness = RecordingWatcher()
    backend.watch(SERVICE, witness)
    backend.publish([instance(1)])
    assert witness.sees(instance(1))
    guarded.restart()  # tokens are not kept, but leases and keys
    assert in_the_end(lambda: backend.renew([instance(1)])) == {}
    backend.publish([instance(2)])
    assert witness.sees(instance(1), instance(2))


def test_a_watch_that_is_added_when_the_token_of_the_stream_is_void_is_seen_too(
    guarded, opened
) -> None:
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
        witness = RecordingWatcher()
        backend.watch(SERVICE, witness)
        with pytest.raises(RegistryRefused, match=why):
            backend.publish([instance()])
        with pytest.raises(RegistryRefused, match=why):
            backend.lookup(SERVICE)
        assert witness.doubts()
        assert all(isinstance(told, str) for told in witness.news)


def test_a_service_that_may_not_be_watched_hurts_no_other(guarded, opened) -> None:
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


def test_a_login_that_etcd_does_not_want_yet_is_given_when_it_does(opened) -> None:
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    with EtcdEngine("--bcrypt-cost", "4") as etcd:
        backend = opened(etcd.url(user="bob:secret", namespace="bobs"))
        backend.publish([instance()])
        etcd.require_login("bob", "secret", prefix="/bobs/")
        assert backend.renew([instance()]) == {}


# Which member, and which connection


def test_a_member_without_a_leader_is_asked_to_end_the_stream(opened) -> None:
    given = []

    def watch(requests, context):
        given.append(dict(context.invocation_metadata()))
        yield from ()

    handler = grpc.stream_stream_rpc_method_handler(watch)
    with futures.ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("etcdserverpb.Watch", {"Watch": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        backend = opened(f"etcd://127.0.0.1:{port}")
        backend.watch(SERVICE, RecordingWatcher())
        assert wait_until(lambda: given)
        backend.close()
        server.stop(None).wait()
    assert given[0]["hasleader"] == "true"  # as etcd's own client does, WithRequireLeader


def test_the_end_of_the_last_watch_is_no_reason_to_leave_a_connection(opened) -> None:
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    with EtcdEngine() as etcd:
        backend, publisher = opened(etcd.url()), opened(etcd.url())
        for port in range(1, 4):
            witness = RecordingWatcher()
            watch = backend.watch(SERVICE, witness)
            assert wait_until(lambda witness=witness: witness.news)
            channel = backend._client._channel
            watch.close()
            assert wait_until(lambda: backend._watches._stream is None)
            assert backend._client._channel is channel
            publisher.publish([instance(port)])


# The end of a connection


def test_a_connection_into_a_black_hole_is_left_for_a_new_one(opened) -> None:
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    with EtcdEngine() as etcd, etcd.proxy() as proxy:
        backend = opened(etcd.url(port=proxy.port), lease=60.0, timeout=0.3)
        witness = RecordingWatcher()
        backend.watch(SERVICE, witness)  # keeps the old one, as no probe is due
        backend.publish([instance()])
        assert witness.sees(instance())
        proxy.blackhole()
        before = time.monotonic()
        with pytest.raises(RegistryUnavailable, match=r"no answer in 0\.3 s"):
            backend.renew([instance()])
        assert backend.renew([instance()]) == {}
        assert time.monotonic() - before < 5
        backend.close()
        proxy.heal()
        assert wait_until(lambda: proxy.connections == 0)
