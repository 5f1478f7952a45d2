"""`FlakyBackend`."""

import threading
import time

import pytest

from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import (
    ConfigurationError,
    RegistryClosed,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import Registry, RegistryPolicy
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.testing import FlakyBackend, check_backend

LEASE = 6.0
ONE = ServiceInstance(service="shop.Orders", host="10.0.0.1", port=1)
TWO = ServiceInstance(service="shop.Orders", host="10.0.0.2", port=1)


class RecordingWatcher:
    """Records views as lists of ids, and reasons of lost contact."""

    def __init__(self):
        self.calls = []

    def on_view(self, view):
        self.calls.append(sorted(view.records))

    def on_contact_lost(self, reason):
        self.calls.append(reason)


@pytest.fixture
def opened(timer):
    """A function that opens flaky backends on one engine; closed after the test."""
    made = []

    def opened(timeout=0.05):
        settings = Settings(LEASE, timeout, timer)
        made.append(FlakyBackend(open_backend("memory://flaky", settings)))
        return made[-1]

    yield opened
    for backend in made:
        backend.close()


def requests(backend):
    """One request of each kind."""
    return {
        "publish": lambda: backend.publish([TWO]),
        "withdraw": lambda: backend.withdraw([TWO]),
        "renew": lambda: backend.renew([TWO]),
        "lookup": lambda: backend.lookup("shop.Orders"),
        "services": backend.services,
    }


def test_a_flaky_backend_that_is_up_passes_all_checks(opened):
    check_backend(opened)


@pytest.mark.parametrize(
    ("state", "error"), [("down", RegistryUnavailable), ("refuse", RegistryRefused)]
)
def test_requests_to_a_backend_that_is_down_or_refuses_fail_at_once(opened, state, error):
    backend, other = opened(), opened()
    getattr(backend, state)("a cable was cut")
    for ask in requests(backend).values():
        with pytest.raises(error, match="memory://flaky: a cable was cut"):
            ask()
    assert other.services() == []
    backend.up()
    backend.publish([ONE])
    assert other.services() == ["shop.Orders"]


def test_lose_answers_executes_requests_and_raises_registry_unavailable(opened):
    backend, other = opened(), opened()
    backend.lose_answers()
    with pytest.raises(RegistryUnavailable, match="the answer was lost"):
        backend.publish([ONE])
    assert list(other.lookup("shop.Orders").records) == [ONE.id]


def test_requests_to_a_frozen_backend_fail_after_their_timeout(opened):
    backend = opened()
    backend.freeze()
    begin = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="does not answer"):
        backend.publish([ONE])
    assert time.monotonic() - begin >= 0.05


@pytest.mark.parametrize("end", ["up", "close"])
def test_a_hanging_request_is_executed_after_up_and_fails_after_close(opened, end):
    backend = opened(timeout=2 * WAIT_S)
    backend.freeze()
    ended = []

    def ask():
        try:
            backend.publish([ONE])
            ended.append("done")
        except RegistryClosed:
            ended.append("closed")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert wait_until(lambda: backend.requests)
    getattr(backend, end)()
    thread.join(WAIT_S)
    assert ended == ["done" if end == "up" else "closed"]


def test_leases_end_while_the_backend_is_down(opened, timer):
    backend = opened()
    backend.publish([ONE])
    backend.down()
    timer.advance(LEASE - 1)
    backend.up()
    assert backend.renew([ONE]) == {}
    backend.down()
    timer.advance(LEASE)
    backend.up()
    assert backend.renew([ONE]) == {ONE.key: "lease"}


def test_a_watcher_gets_contact_lost_after_down_and_a_view_after_up(opened):
    backend, other = opened(), opened()
    backend.publish([ONE])
    other.watch("shop.Orders", watcher := RecordingWatcher())
    other.down("cut")
    backend.publish([TWO])
    assert watcher.calls == [[ONE.id], "cut"]
    other.up()
    assert watcher.calls == [[ONE.id], "cut", [ONE.id, TWO.id]]
    other.up()
    other.lose_answers()
    assert len(watcher.calls) == 3


def test_a_watcher_of_a_frozen_backend_gets_no_call_until_up(opened):
    backend, other = opened(), opened()
    other.watch("shop.Orders", watcher := RecordingWatcher())
    other.freeze()
    backend.publish([ONE])
    assert watcher.calls == [[]]
    other.up()
    assert watcher.calls == [[], "contact was lost", [ONE.id]]


def test_a_watch_begun_while_the_backend_is_down_gets_a_view_after_up(opened):
    backend = opened()
    backend.publish([ONE])
    backend.down()
    watch = backend.watch("shop.Orders", watcher := RecordingWatcher())
    backend.up()
    assert watcher.calls[-1] == [ONE.id]
    watch.close()
    backend.withdraw([ONE])
    assert watcher.calls[-1] == [ONE.id]


def test_forget_removes_all_records_and_renew_reports_wiped_until_republished(opened):
    backend, other = opened(), opened()
    backend.publish([ONE])
    other.publish([TWO])
    backend.watch("shop.Orders", watcher := RecordingWatcher())
    backend.forget()
    assert other.services() == []
    assert watcher.calls == [[ONE.id, TWO.id], "the engine has lost its data", []]
    assert backend.renew([ONE]) == backend.renew([ONE]) == {ONE.key: "wiped"}
    assert other.renew([TWO]) == {TWO.key: "missing"}
    backend.publish([ONE])
    assert backend.renew([ONE]) == {}


def test_forget_while_the_backend_is_down(opened):
    backend = opened()
    backend.publish([ONE])
    backend.watch("shop.Orders", watcher := RecordingWatcher())
    backend.down("cut")
    backend.forget()
    backend.up()
    assert watcher.calls == [[ONE.id], "cut", "the engine has lost its data", []]
    assert backend.renew([ONE]) == {ONE.key: "wiped"}


def test_requests_lists_all_requests_including_failed_ones(opened):
    backend = opened()
    backend.publish([ONE, TWO])
    backend.down()
    with pytest.raises(RegistryUnavailable):
        backend.renew([ONE])
    backend.watch("a", RecordingWatcher())
    with pytest.raises(RegistryUnavailable):
        backend.lookup("b")
    assert backend.requests == [
        ("publish", (ONE.id, TWO.id)),
        ("renew", (ONE.id,)),
        ("watch", ("a",)),
        ("lookup", ("b",)),
    ]


def test_close_closes_the_inner_backend_in_any_state(opened, timer):
    for spoil in ("up", "down", "freeze"):
        backend = opened()
        backend.publish([ONE])
        backend.watch("shop.Orders", RecordingWatcher())
        getattr(backend, spoil)()
        backend.close()
        backend.close()
        for ask in requests(backend).values():
            with pytest.raises(RegistryClosed):
                ask()
    assert timer.pending == 0


def test_a_flaky_backend_is_read_only_if_the_inner_backend_is(timer):
    settings = Settings(LEASE, 0.05, timer)
    backend = FlakyBackend(open_backend("headless://localhost:1", settings))
    with (
        Registry(
            backend, registry_policy=RegistryPolicy(lease_ttl=LEASE, snapshot=False)
        ) as registry,
        pytest.raises(ConfigurationError, match="for reading only"),
    ):
        registry.register(ONE)


def test_refresh_is_passed_to_the_inner_backend(opened, monkeypatch):
    backend, services = opened(), []
    monkeypatch.setattr(backend.inner, "refresh", services.append)
    backend.refresh("shop.Orders")
    assert services == ["shop.Orders"]
