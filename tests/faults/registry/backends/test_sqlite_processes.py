"""Processes that share a registry in a file: killed and stopped."""

import signal
import sys
from contextlib import contextmanager

import pytest

from fixtures.engine_watchers import RecordingWatcher
from fixtures.processes import LineProgram
from fixtures.waiting import wait_until
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend

SERVICE = "shop.Orders"

PUBLISHER = """
import os, select, signal, sys
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
url, lease, name, many = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
backend = open_backend(url, Settings(lease, 60.0))
mine = [ServiceInstance(service="shop.Orders", host=name, port=1 + n) for n in range(many)]
backend.publish(mine)
print("published", flush=True)
while True:
    lost = backend.renew(mine)
    if lost:
        print("lost", sorted(set(lost.values())), flush=True)
        backend.publish(mine)
    if select.select([sys.stdin], [], [], 0.1)[0]:
        sys.stdin.readline() or sys.exit()
        os.kill(os.getpid(), signal.SIGSTOP)
"""
"""A line of input stops it when it has no lock of the file, which would stop all others too."""


@contextmanager
def process(path, name, *, many=1, lease):
    """Another process that publishes and renews; killed in the end."""
    command = [sys.executable, "-c", PUBLISHER, f"sqlite://{path}", str(lease), name, str(many)]
    with LineProgram(command, path.with_name(f"{name}.log")) as running:
        yield running.wait_for("published")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.db"


@pytest.fixture
def backend(path):
    backend = open_backend(f"sqlite://{path}", Settings(3600.0, 60.0))
    yield backend
    backend.close()


def test_instances_of_a_killed_process_are_removed_at_the_end_of_its_lease_only(backend, path):
    backend.watch(SERVICE, watcher := RecordingWatcher())
    with (
        process(path, "a", many=20, lease=1.0) as a,
        process(path, "b", many=20, lease=3600.0) as b,
    ):
        those_of_b = [f"b:{1 + number}" for number in range(20)]
        everybody = [f"a:{1 + number}" for number in range(20)] + those_of_b
        assert watcher.sees(*everybody)
        a.process.kill()
        assert watcher.sees(*those_of_b)
        assert sorted(backend.lookup(SERVICE).records) == sorted(those_of_b)
        assert b.process.poll() is None
    assert not any(isinstance(news, str) for news in watcher.news)


def test_a_process_stopped_for_longer_than_its_lease_notices_that_the_lease_is_lost(backend, path):
    backend.watch(SERVICE, watcher := RecordingWatcher())
    with process(path, "a", lease=1.0) as a:
        assert watcher.sees("a:1")
        a.tell("stop")
        assert watcher.sees()
        a.process.send_signal(signal.SIGCONT)
        assert a.answer() == "lost ['lease']"
        assert wait_until(lambda: len(watcher.news) > 2)
        assert watcher.sees("a:1")
