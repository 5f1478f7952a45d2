"""A process that starts while the registry is down serves itself from what an earlier one saw."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys

import pytest

from fixtures.registry_worlds import held
from fixtures.seen_worlds import SERVICE, Listener, instance, instances, keys
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import NotPublished, RegistryUnavailable
from rpcwheel.observe.events import SnapshotFailed
from rpcwheel.registry import FailbackRegistry, RegistryPolicy
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers import open_provider
from rpcwheel.registry.snapshots import AGAIN_S, DEBOUNCE_S, Snapshots
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import FlakyProvider

LEASE_S = 6.0
A_WHILE = 1.0
"""Seconds after which the file is taken, if the registry does not say that it is down."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shop.json"


@pytest.fixture
def engine(request):
    """Its URL; gone with the test."""
    return f"memory://{request.node.name[:40]}"


@pytest.fixture
def start(path, timer, engine):
    """Start a process: its registry, whose engine is up or down, and its provider."""
    with contextlib.ExitStack() as opened:

        def start(*, up=True):
            settings = Settings(lease_s=LEASE_S, timeout_s=1.0, timer=timer)
            provider = FlakyProvider(open_provider(parse_url(engine), settings))
            if not up:
                provider.down()
            policy = RegistryPolicy(lease=LEASE_S, timeout=1.0, snapshot=str(path))
            return provider, opened.enter_context(
                FailbackRegistry(provider, policy=policy, timer=timer)
            )

        yield start
    assert timer.pending == 0


@pytest.fixture
def servers(start):
    """Three that stay."""
    _, registry = start()
    for one in instances("a", "b", "c"):
        registry.register(one, wait=WAIT_S)
    return registry


def an_earlier_run(start, path):
    """A client that saw them, and ended."""
    _, registry = start()
    with registry.subscribe(SERVICE) as subscription:
        assert keys(subscription.wait(WAIT_S)) == "abc"
    registry.close()
    assert path.exists()


def failures(events):
    return [event for event in events if isinstance(event, SnapshotFailed)]


def test_a_client_that_starts_without_the_registry_has_what_the_one_before_saw(
    start, servers, path, timer
):
    an_earlier_run(start, path)
    provider, registry = start(up=False)
    listener = Listener()
    subscription = registry.subscribe(SERVICE, listener)
    assert wait_until(lambda: timer.advance(A_WHILE / 10) >= 0 and subscription.snapshot)
    snapshot = subscription.wait(WAIT_S)
    assert (keys(snapshot), snapshot.source) == ("abc", "cache")
    assert 0 <= snapshot.age_s < 60
    servers.register(instance("d"), wait=WAIT_S)
    provider.up()
    assert wait_until(lambda: keys(subscription.snapshot) == "abcd")
    assert subscription.snapshot.source == "live"
    assert wait_until(lambda: listener.keys == ["abc", "abcd"])


def test_so_does_one_that_only_looks_up(start, servers, path):
    an_earlier_run(start, path)
    provider, registry = start(up=False)
    found = registry.lookup(SERVICE)
    assert (keys(found), found.source) == ("abc", "cache")
    provider.up()
    assert registry.lookup(SERVICE).source == "live"


def test_what_was_only_looked_up_is_remembered_too(start, servers, path):
    _, registry = start()
    assert keys(registry.lookup(SERVICE)) == "abc"
    registry.close()
    _, later = start(up=False)
    assert keys(later.lookup(SERVICE)) == "abc"


def test_a_registry_that_comes_back_without_its_memory_erases_nothing(start, servers, path, timer):
    an_earlier_run(start, path)
    provider, registry = start(up=False)
    subscription = registry.subscribe(SERVICE)
    assert wait_until(lambda: timer.advance(A_WHILE / 10) >= 0 and subscription.snapshot)
    servers._session._provider.down()  # or they might publish before anybody has looked
    provider.forget()
    provider.up()
    assert wait_until(lambda: timer.advance(0.001) >= 0 and subscription.snapshot.source == "held")
    assert keys(subscription.snapshot) == "abc"
    servers._session._provider.up()
    end = timer.now + LEASE_S
    while held(provider, SERVICE) != ["a", "b", "c"]:  # the servers look, and publish again
        timer.advance(0.1)
        assert wait_until(lambda: not servers._session._working and timer.pending)
        assert timer.now < end
    assert wait_until(lambda: subscription.snapshot.source == "live")
    assert keys(subscription.snapshot) == "abc"


def test_with_a_torn_file_nothing_is_known_and_never_an_empty_list(
    start, servers, path, timer, events
):
    path.write_bytes(b'{"v": 1, "services": {"shop.Ord')
    provider, registry = start(up=False)
    subscription = registry.subscribe(SERVICE)
    timer.advance(2 * A_WHILE)
    with pytest.raises(NotPublished):
        subscription.wait(0.05)
    with pytest.raises(RegistryUnavailable):
        registry.lookup(SERVICE)
    assert len(failures(events)) == 1
    provider.up()
    assert keys(subscription.wait(WAIT_S)) == "abc"
    registry.close()
    assert keys(Snapshots(path, "again", timer=timer).load(SERVICE)) == "abc"


PROCESS = """
import sys
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import RegistryPolicy, open_registry

url, path, service = sys.argv[1:]
with open_registry(url, policy=RegistryPolicy(snapshot=path)) as registry:
    registry.register(ServiceInstance(service=service, host="10.0.0.7", port=1), wait=20)
    with registry.subscribe(service) as subscription:
        subscription.wait(20)
        print("seen", flush=True)
        sys.stdin.read()
"""


def test_two_processes_on_one_file_leave_what_both_have_seen(tmp_path, path, timer):
    url = f"sqlite://{tmp_path}/registry.db"
    command = [sys.executable, "-W", "error", "-c", PROCESS, url, str(path)]
    services = ["shop.Bills", "shop.Orders"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen([*command, service], **pipes) for service in services]
    for process in processes:
        assert process.stdout.readline() == b"seen\n"
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    after = Snapshots(path, "after", timer=timer)
    assert [keys(after.load(service)) for service in services] == ["10.0.0.7:1"] * 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("a small file system can be mounted only by root, on Linux")
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a file system can't be mounted in this container")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_on_a_full_disk_all_goes_on_and_the_old_file_stays_whole(small_disk, timer, events):
    path = small_disk / "shop.json"
    snapshots = Snapshots(path, "memory://", timer=timer)
    snapshots.keep(SERVICE, instances("a"))
    timer.advance(DEBOUNCE_S)
    assert wait_until(path.exists)
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError):
        ballast.write_bytes(bytes(2**20))
    many = [instance(f"i{number}", metadata={"x": "y" * 1000}) for number in range(30)]
    snapshots.keep(SERVICE, many)
    timer.advance(DEBOUNCE_S)
    assert wait_until(lambda: failures(events) and timer.pending == 1)
    assert failures(events)[0].error.errno == errno.ENOSPC
    assert keys(Snapshots(path, "another", timer=timer).load(SERVICE)) == "a"
    assert sorted(one.name for one in small_disk.iterdir()) == [
        "ballast",
        path.name,
        f"{path.name}.lock",
    ]
    ballast.unlink()
    timer.advance(AGAIN_S)
    other = Snapshots(path, "another", timer=timer)
    assert wait_until(lambda: len(other.load(SERVICE).instances) == 30)
    snapshots.close()
    assert len(failures(events)) == 1
