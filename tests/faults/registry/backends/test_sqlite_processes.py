"""Processes that share a registry in a file: killed, stopped, and with the file deleted."""

import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from fixtures.engine_watchers import RecordingWatcher
from fixtures.waiting import wait_until
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend

SERVICE = "shop.Orders"
ONE = ServiceInstance(service=SERVICE, host="10.0.0.1", port=1)

PUBLISHER = """
import sys, time
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
    time.sleep(0.1)
"""


@contextmanager
def process(path, name, *, many=1, lease):
    """Another process that publishes and renews; killed in the end."""
    command = [sys.executable, "-c", PUBLISHER, f"sqlite://{path}", str(lease), name, str(many)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout.readline() == "published\n"
            yield running
        finally:
            running.kill()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.db"


@pytest.fixture
def backend(path):
    backend = open_backend(f"sqlite://{path}", Settings(3600.0, 60.0))
    yield backend
    backend.close()


def test_a_process_that_is_killed_is_gone_after_its_lease_and_the_others_stay(backend, path):
    backend.watch(SERVICE, witness := RecordingWatcher())
    with (
        process(path, "a", many=20, lease=1.0) as a,
        process(path, "b", many=20, lease=3600.0) as b,
    ):
        those_of_b = [f"b:{1 + number}" for number in range(20)]
        everybody = [f"a:{1 + number}" for number in range(20)] + those_of_b
        assert witness.sees(*everybody)
        a.kill()
        assert witness.sees(*those_of_b)
        assert sorted(backend.lookup(SERVICE).records) == sorted(those_of_b)
        assert b.poll() is None
    assert not any(isinstance(news, str) for news in witness.news)


def test_a_process_that_was_stopped_longer_than_its_lease_learns_that_it_was_gone(backend, path):
    backend.watch(SERVICE, witness := RecordingWatcher())
    with process(path, "a", lease=1.0) as a:
        assert witness.sees("a:1")
        a.send_signal(signal.SIGSTOP)
        assert witness.sees()
        a.send_signal(signal.SIGCONT)
        assert a.stdout.readline() == "lost ['lease']\n"
        assert wait_until(lambda: len(witness.news) > 2)
        assert witness.sees("a:1")


def test_a_file_that_is_deleted_is_made_again_by_who_publishes_and_all_converge(backend, path):
    backend.publish([ONE])
    backend.watch(SERVICE, witness := RecordingWatcher())
    with process(path, "a", lease=3600.0) as a:
        assert witness.sees(ONE, "a:1")
        path.unlink()
        assert a.stdout.readline() == "lost ['wiped']\n"
        assert backend.renew([ONE]) == {ONE.key: "wiped"}
        backend.publish([ONE])
        assert witness.doubts()
        assert witness.sees(ONE, "a:1")
