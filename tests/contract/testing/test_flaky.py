"""`FlakyBackend`."""

import time

import pytest

from fixtures.engine_watchers import RecordingWatcher
from fixtures.waiting import WAIT_S, in_thread, wait_until
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


@pytest.fixture
def opened(timer, closed_later):
    """A function that opens flaky backends on one engine; closed after the test."""

    def opened(timeout=0.05):
        settings = Settings(LEASE, timeout, timer)
        return closed_later(FlakyBackend(open_backend("memory://flaky", settings)))

    return opened


def requests(backend):
    """One request of each kind."""
    return {
        "publish": lambda: backend.publish([TWO]),
        "withdraw": lambda: backend.withdraw([TWO]),
        "renew": lambda: backend.renew([TWO]),
        "lookup": lambda: backend.lookup("shop.Orders"),
        "services": backend.services,
        "consumers": lambda: backend.consumers(["shop.Orders"]),
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


def test_lost_and_missing_answers_are_registry_unavailable(opened):
    backend, other = opened(), opened()
    backend.lose_answers()
    with pytest.raises(RegistryUnavailable, match="the answer was lost"):
        backend.publish([ONE])
    assert list(other.lookup("shop.Orders").records) == [ONE.id]
    backend.freeze()
    begin = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="does not answer"):
        backend.publish([TWO])
    assert time.monotonic() - begin >= 0.05


@pytest.mark.parametrize("end", ["up", "close"])
def test_a_hanging_request_is_executed_after_up_and_fails_after_close(opened, end):
    backend = opened(timeout=2 * WAIT_S)
    backend.freeze()
    publishing = in_thread(backend.publish, [ONE])
    assert wait_until(lambda: backend.requests)
    getattr(backend, end)()
    error = publishing.exception(WAIT_S)
    assert error is None if end == "up" else isinstance(error, RegistryClosed)


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


@pytest.mark.parametrize(
    ("fail", "while_failing", "reason"),
    [("down", ["down"], "down"), ("freeze", [], "contact was lost")],
)
def test_a_watcher_learns_of_a_failure_and_gets_one_view_after_up(
    opened, fail, while_failing, reason
):
    backend, other = opened(), opened()
    backend.publish([ONE])
    other.watch("shop.Orders", watcher := RecordingWatcher())
    getattr(other, fail)(*while_failing)
    other.watch("shop.Orders", later := RecordingWatcher())
    backend.publish([TWO])
    assert watcher.news == [{ONE.id}, *while_failing]
    other.up()
    other.up()
    other.lose_answers()
    assert watcher.news == [{ONE.id}, reason, {ONE.id, TWO.id}]
    assert later.news[-1] == {ONE.id, TWO.id}


def test_a_closed_watch_gets_no_view(opened):
    backend = opened()
    watch = backend.watch("shop.Orders", watcher := RecordingWatcher())
    watch.close()
    backend.publish([ONE])
    assert watcher.news == [set()]


@pytest.mark.parametrize("is_down", [False, True])
def test_forget_removes_all_records_and_renew_reports_wiped_until_republished(opened, is_down):
    backend, other = opened(), opened()
    backend.publish([ONE])
    other.publish([TWO])
    backend.watch("shop.Orders", watcher := RecordingWatcher())
    if is_down:
        backend.down("cut")
    backend.forget()
    backend.up()
    assert other.services() == []
    reason = "cut" if is_down else "the engine has lost its data"
    assert watcher.news == [{ONE.id, TWO.id}, reason, set()]
    assert backend.renew([ONE]) == backend.renew([ONE]) == {ONE.key: "wiped"}
    assert other.renew([TWO]) == {TWO.key: "missing"}
    backend.publish([ONE])
    assert backend.renew([ONE]) == {}


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


def test_refresh_consumers_and_read_only_are_those_of_the_inner_backend(opened, timer, monkeypatch):
    backend, services = opened(), []
    monkeypatch.setattr(backend.inner, "refresh", services.append)
    backend.refresh("shop.Orders")
    assert services == ["shop.Orders"]
    consumers = {None: ["a", "b"], ("shop.Orders",): ["a"]}
    monkeypatch.setattr(backend.inner, "consumers", consumers.get)
    assert backend.consumers() == ["a", "b"]
    assert backend.consumers(("shop.Orders",)) == ["a"]
    headless = open_backend("headless://localhost:1", Settings(LEASE, 0.05, timer))
    policy = RegistryPolicy(lease_ttl=LEASE, snapshot=False)
    with (
        Registry(FlakyBackend(headless), registry_policy=policy) as registry,
        pytest.raises(ConfigurationError, match="for reading only"),
    ):
        registry.register(ONE)
