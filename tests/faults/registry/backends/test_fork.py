"""A forked child does not disturb its parent's lease and watches, and does not crash.

Each case of the first test runs in a process of its own, without gRPC's fork handlers: in a child
they start a poller of gRPC's, which can abort the process whatever the child does
(grpc/grpc#43055). So the child gets along only if rpcwheel leaves what gRPC has in the parent
alone.
"""

import sys

import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_redis import RedisEngine
from fixtures.engine_watchers import in_the_end, instance
from fixtures.engine_zookeeper import ZookeeperEngine
from fixtures.processes import PATHS, LineProgram
from fixtures.programs import run_program
from fixtures.waiting import WAIT_S

PROGRAM = """
import os, signal, sys
from fixtures.engine_watchers import RecordingWatcher, instance
from fixtures.waiting import WAIT_S
from rpcwheel.errors import RegistryClosed
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend

A, B = instance(1), instance(2)

def refused():
    try:
        backend.lookup(A.service)
    except RegistryClosed as error:
        return "before the fork" in str(error)

def begins_anew():
    backend.publish([B])
    found = backend.lookup(A.service).records
    backend.withdraw([B])  # to close gives a slow engine little time for it
    return found == {A.id: A.encoded(), B.id: B.encoded()}

backend, witness = open_backend(sys.argv[1], Settings(60.0, 10.0)), RecordingWatcher()
backend.watch(A.service, witness)
backend.publish([A])
assert witness.sees(A)
if sys.argv[1].startswith("etcd"):
    locks, check = (backend._lock,), refused
elif sys.argv[1].startswith("redis"):
    locks, check = (backend._listener._lock, backend._polling._lock), begins_anew
else:
    locks, check = (backend._session._lock, backend._polling._lock), begins_anew
for lock in locks:  # as another thread may hold them
    lock.acquire()
child = os.fork()
if not child:
    signal.alarm(int(WAIT_S))  # a child that hangs is one that fails
    good = False
    try:
        good = check()
        backend.close()
    finally:
        os._exit(0 if good else 1)
for lock in locks:
    lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert backend.renew([A]) == {}
assert witness.sees(A)
backend.close()
"""


@pytest.mark.parametrize("kind", [EtcdEngine, RedisEngine, ZookeeperEngine])
def test_a_forked_child_leaves_its_parent_the_lease_and_the_watches(kind, monkeypatch):
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    with kind() as engine:
        run_program(PROGRAM, engine.url())


CHILDREN = 20

FOLLOWER = """
import os, signal, sys, time
from rpcwheel import RegistryPolicy, open_registry
from rpcwheel.registry import ServiceInstance
from fixtures.waiting import WAIT_S, wait_until

policy = RegistryPolicy(lease_ttl=3.0, timeout=1.0, snapshot=False)
with open_registry(sys.argv[1], registry_policy=policy) as registry:
    subscription = registry.subscribe("shop.Orders")
    wait_until(lambda: subscription.snapshot and subscription.snapshot.instances)
    registry.register(ServiceInstance(service="shop.Bills", host="10.0.0.1", port=1), wait=WAIT_S)
    print("follows", flush=True)
    sys.stdin.readline()  # etcd is frozen
    ended = []
    for _ in range(int(sys.argv[2])):
        time.sleep(0.05)  # so that another attempt to connect has begun
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(WAIT_S))  # a child that hangs is one that fails
            time.sleep(0.1)  # gRPC's threads begin anew in the child
            os._exit(0)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("forked", flush=True)
    sys.stdin.readline()  # etcd is back, with another instance
    wait_until(lambda: len(subscription.snapshot.instances) == 2)
print(ended.count(0), flush=True)
"""


@pytest.mark.parametrize("fork_support", ["0", None])
def test_forks_while_etcd_is_frozen(opened, fork_support, monkeypatch, tmp_path):
    """gRPC connects again all the time then. Its own fork handlers can crash the children."""
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    if fork_support is not None:
        monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", fork_support)
    with EtcdEngine() as engine:
        publisher = opened(engine.url())
        publisher.publish([instance(1)])
        command = [sys.executable, "-P", "-c", FOLLOWER, engine.url(), str(CHILDREN)]
        log = tmp_path / "log"
        with LineProgram(command, log, PYTHONPATH=PATHS) as follower:
            assert follower.answer() == "follows"
            engine.freeze()
            assert follower.ask("") == "forked"
            engine.thaw()
            in_the_end(lambda: publisher.publish([instance(1), instance(2)]))
            ended = int(follower.ask(""))
            assert follower.process.wait(WAIT_S) == 0, log.read_text()
    warning = "RuntimeWarning: this process has an etcd registry and forks"
    assert log.read_text().count(warning) == (0 if fork_support == "0" else 1)
    assert fork_support is None or ended == CHILDREN
