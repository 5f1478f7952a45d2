"""A long queue does not overload a healthy server, over the wire."""

import threading
import time

import grpc
import pytest

from fixtures.grpc_servers import GrpcServer, unary_service
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import FailbackPolicy, Kit
from rpcwheel.failback import JournalWorker

THREADS, SERVICE_S = 8, 0.1
CALLS = 400
"""So many would wait in the server for 5 s."""

MOST_WAITING = 100
"""The largest number of calls that may wait in the server: 6 to 9, without pacing more than 180."""

METHOD = "/shop.Audit/Push"


class Server(GrpcServer):
    """A server whose few threads are busy with each call. Refuses all calls until `is_up`."""

    def __init__(self):
        self.executions = []
        self.most_waiting = 0
        self.is_up = False
        self._lock = threading.Lock()
        super().__init__(unary_service(METHOD, self._execute), workers=THREADS)

    def _execute(self, request, context):
        if not self.is_up:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        with self._lock:
            self.executions.append(request)
            self.most_waiting = max(self.most_waiting, self.pool._work_queue.qsize())
        time.sleep(SERVICE_S)
        return b""


@pytest.fixture
def server():
    with Server() as server:
        yield server


@pytest.fixture(params=["memory", "journal"])
def policy(request, tmp_path):
    """A program that does not name DEADLINE_EXCEEDED, as in the guide."""
    settings = {"max_pending": 2 * CALLS, "max_attempts": 1000}
    if request.param == "journal":
        settings = {"journal": f"sqlite://{tmp_path}/failback.db"}
    return FailbackPolicy(retry_on="UNAVAILABLE", backoff=2.0, name="audit", **settings)


def assert_delivered(server, stats, delivered=CALLS):
    assert len(set(server.executions)) == CALLS
    assert (stats.redelivered, stats.gave_up) == (delivered, 0)
    assert server.most_waiting <= MOST_WAITING


def test_calls_that_failed_together_are_delivered_by_the_program(world, server, policy):
    kit = world.keep(world.do(world.api.Kit, failback=policy))
    channel = world.keep(world.do(kit.channel, server.target))
    push = channel.unary_unary(METHOD)
    for number in range(CALLS):
        world.do(push, b"%d" % number, timeout=WAIT_S)
    server.is_up = True

    def stats():
        return world.do(kit.stats)["audit"]

    wait_until(lambda: stats().redelivered == CALLS, timeout=4 * WAIT_S)
    assert_delivered(server, stats())


@pytest.mark.parametrize("policy", ["journal"], indirect=True)
def test_calls_that_failed_together_are_delivered_by_a_worker(server, policy):
    with Kit(failback=policy) as kit, kit.channel(server.target) as channel:
        push = channel.unary_unary(METHOD)
        for number in range(CALLS):
            push(b"%d" % number, timeout=WAIT_S)
        kit.close(0)
    server.is_up = True
    with JournalWorker(policy.journal, backoff=2.0) as worker:
        wait_until(lambda: len(set(server.executions)) == CALLS, timeout=4 * WAIT_S)
        wait_until(lambda: worker.stats()["audit"].redelivered == CALLS)
        assert_delivered(server, worker.stats()["audit"])
