"""What must not keep a server's end from coming, and what its end must not undo."""

import subprocess
import sys
import threading

import pytest

from fixtures.shops import SERVICE
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.observe import ServingEnds, add_sink, remove_sink
from rpcwheel.registry.publisher import Publisher
from rpcwheel.registry.sync import Registry, open_registry
from rpcwheel.timer import WheelTimer

QUICK = {"port": 0, "lame_duck": 0.05, "grace": 5.0}


@pytest.fixture
def registry(memory):
    with open_registry(memory) as registry:
        yield registry


@pytest.fixture
def shop(make_shop):
    return make_shop()


def seen_by(registry):
    return [(one.status, one.weight) for one in registry.lookup(SERVICE).instances]


def test_a_sink_that_hangs_holds_up_no_end(shop, memory):
    goes_on = threading.Event()

    def hang(event):
        if isinstance(event, ServingEnds):
            goes_on.wait(60)

    add_sink(hang)
    try:
        published = Publisher(shop.server, memory, SERVICE, **QUICK)
        published.start()
        published.begin_stop()
        assert published.wait(WAIT_S)
    finally:
        remove_sink(hang)
        goes_on.set()


def test_what_was_unregistered_by_hand_is_not_published_again_by_the_end(shop, registry, memory):
    published = Publisher(shop.server, registry, SERVICE, "shop.Other", **QUICK)
    published.start()
    published.registrations[0].unregister(wait=WAIT_S)
    shown = []
    with (
        open_registry(memory) as other,
        other.subscribe(SERVICE, lambda snapshot: shown.append(len(snapshot.instances))) as seen,
    ):
        seen.wait(WAIT_S)
        published.stop()
        other.lookup(SERVICE)
    assert shown == [0]
    assert {one.state for one in published.registrations} == {"GONE"}


def test_what_was_changed_by_hand_stays_so_while_it_drains(shop, registry, memory):
    published = Publisher(shop.server, registry, SERVICE, **QUICK)
    published.start()
    published.registrations[0].update(weight=7)
    shown = []
    with (
        open_registry(memory) as other,
        other.subscribe(
            SERVICE, lambda snapshot: shown.extend(one.weight for one in snapshot.instances)
        ) as seen,
    ):
        assert wait_until(lambda: seen.snapshot and seen.snapshot.instances[0].weight == 7)
        published.stop()
        assert wait_until(lambda: not seen.snapshot.instances)
    assert shown[-1] == 7


def test_a_timer_that_is_stopped_while_clients_hear_of_it_holds_up_no_end(shop, memory, events):
    timer = WheelTimer()
    published = Publisher(shop.server, memory, SERVICE, timer=timer, **QUICK | {"lame_duck": 0.5})
    published.start()
    published.begin_stop()
    assert wait_until(lambda: any(getattr(one, "step", "") == "wait" for one in events))
    assert wait_until(lambda: timer.pending)
    timer.stop()
    assert published.wait(WAIT_S)


class Hanging(Registry):
    """A user's, which never answers when something is to be withdrawn."""

    def __init__(self, inner, goes_on):
        self._inner, self._goes_on = inner, goes_on
        self.register, self.subscribe = inner.register, inner.subscribe
        self.lookup, self.unsubscribe, self.close = inner.lookup, inner.unsubscribe, inner.close

    def unregister(self, what, *, wait=None):
        self._goes_on.wait(60)

    register = subscribe = unsubscribe = lookup = close = None


def test_registries_that_hang_keep_no_server_from_saying_that_it_ends(make_shop, registry, memory):
    goes_on, said = threading.Event(), []

    class Health:
        def set(self, service, status):
            said.append((self, status))

    hanging = Hanging(registry, goes_on)
    every = [
        Publisher(
            make_shop().server, [hanging, memory], f"{SERVICE}{number}", health=Health(), **QUICK
        )
        for number in range(6)
    ]
    try:
        for one in every:
            one.start()
            one.begin_stop()
        assert all(one.wait(WAIT_S) for one in every)
        assert len({health for health, status in said if status == 2}) == 6
        assert wait_until(lambda: all(one.registries[1].closed for one in every))
    finally:
        goes_on.set()


ENDS = """if True:
    import os, signal, threading, time, grpc
    from concurrent.futures import ThreadPoolExecutor
    from rpcwheel.registry.sync import Publisher

    server = grpc.server(ThreadPoolExecutor(2))
    settings = {"port": 0, "lame_duck": 0.01, "grace": 0.1, "signals": True}
    published = Publisher(server, "memory://", "shop.Orders", **settings)
    published.start()

    def kill():
        os.kill(os.getpid(), signal.SIGTERM)
        published.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=kill, daemon=True).start()
    try:
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("as before", published.state)
"""

NO_THREADS = """if True:
    import threading, time, grpc
    from concurrent.futures import ThreadPoolExecutor
    from rpcwheel.registry.sync import Publisher

    server = grpc.server(ThreadPoolExecutor(2))
    settings = {"port": 0, "lame_duck": 0.01, "grace": 0.1}
    published = Publisher(server, "memory://", "shop.Orders", **settings)
    published.start()
    published.wait_published(5)
    time.sleep(0.3)  # the workers have gone

    def start(self):
        raise RuntimeError("can't start new thread")

    threading.Thread.start = start
    began = time.monotonic()
    published.stop()
    print(published.state if time.monotonic() - began < 15 else "late")
"""


@pytest.mark.parametrize(("code", "says"), [(ENDS, "as before closed"), (NO_THREADS, "closed")])
def test_after_the_end_signals_are_as_before_and_it_comes_without_threads_too(code, says):
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout.split() == says.split(), run.stderr
