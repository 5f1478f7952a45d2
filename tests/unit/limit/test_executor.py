"""The executor of a server of `grpc`, with functions in place of calls: what happens in a pause."""

import threading
import time
from contextvars import Context
from types import SimpleNamespace

import grpc
import pytest

from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel.limit import executor, pause
from rpcwheel.limit.executor import LimitInterceptor, ServerExecutor
from rpcwheel.limit.policy import LimitPolicy
from rpcwheel.limit.server import ServerLimit

HANDLER = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
DETAILS = SimpleNamespace(method="/test.Shop/Get", invocation_metadata=())


class Server:
    """Submits calls as gRPC does. A pause begins when the first one ends, and ends when told to."""

    def __init__(self):
        policy = LimitPolicy(max_concurrent=2, max_wait=WAIT_S)
        self.limit = ServerLimit(policy, lambda _: policy, timer=None)
        self.executor = ServerExecutor(2)
        self.gate, self.pause_ended = Gate(), threading.Event()
        self.ran = []
        self._interceptor = LimitInterceptor(self.limit)
        begin, end = self.limit.begin_pause, self.limit.end_pause
        self.limit.begin_pause = lambda now_ns, _: not self.ran[1:] and begin(now_ns, now_ns)
        self.limit.end_pause = lambda *args: self.pause_ended.is_set() and end(*args)

    def arrive(self, name, wait=lambda: None, deadline=1e12):
        """A call whose handler waits. Returns its state, as gRPC has it."""

        def serve(*_):
            wait()
            self.ran.append(name)

        context = Context()
        context.run(self._interceptor.intercept_service, lambda _: HANDLER, DETAILS)
        state = SimpleNamespace(client="open", condition=threading.Lock(), callbacks=[])
        event = SimpleNamespace(call_details=SimpleNamespace(deadline=deadline))
        self.executor.submit(context.run, serve, event, state)
        return state


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(pause, "GIVEN_UP_NS", 1 << 60)  # the machine may be busy
    server = Server()
    yield server
    server.gate.opened.set()
    server.pause_ended.set()
    server.executor.shutdown()


def test_no_call_is_started_in_a_pause(server):
    """Neither when it arrives nor when another handler ends; all are started after the pause."""
    gate, limiter = server.gate, server.limit.limiter
    server.arrive("long", lambda: gate(b""))
    assert gate.entered.wait(WAIT_S)
    server.arrive("first")
    assert wait_until(lambda: server.limit.pause.is_on(time.monotonic_ns()))
    server.arrive("second")
    server.arrive("third")
    gate.opened.set()
    assert wait_until(lambda: limiter.running == 0)
    assert (server.ran, limiter.waiting) == (["first", "long"], 2)
    server.pause_ended.set()
    assert wait_until(lambda: sorted(server.ran[2:]) == ["second", "third"])
    assert wait_until(lambda: limiter.running == 0)


@pytest.mark.parametrize(("deadline", "codes"), [(1e12, []), (0.0, ["UNAVAILABLE"])])
def test_a_call_that_ends_while_it_waits_is_refused_if_its_deadline_has_passed(
    server, monkeypatch, deadline, codes
):
    """Not if its client has canceled it before."""
    refused = []
    monkeypatch.setattr(executor, "end_unserved_call", lambda *args: refused.append(args[2]))
    for name in ("first", "second"):
        server.arrive(name, lambda: server.gate.opened.wait(WAIT_S))
    for callback in server.arrive("third", deadline=deadline).callbacks:
        callback()
    server.executor.shutdown(wait=False)
    assert refused == codes
