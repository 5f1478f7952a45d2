"""The executor of a server of `grpc` with a limit, and its interceptor without the executor."""

import contextlib
import contextvars
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import rpcwheel
from fixtures.forks import holds_in_child
from fixtures.grpc_servers import GrpcServer, unary_service
from fixtures.limited_servers import LONG_S, SHORT_S
from fixtures.shop import SERVICE, UNARY_UNARY
from fixtures.small_servers import METHOD
from fixtures.waiting import WAIT_S, Gate, wait_until
from fixtures.worlds import only_sync
from rpcwheel.call import MethodPolicy
from rpcwheel.events import LimitIneffective, add_sink, remove_sink
from rpcwheel.limit import LimitPolicy, ServerExecutor
from rpcwheel.status.snapshot import snapshot
from rpcwheel.telemetry import components

Code = grpc.StatusCode
OTHER = f"/{SERVICE}/Other"
PATIENT = {"limit": LimitPolicy(max_concurrent=1, max_wait=LONG_S)}
HEALTH = "/grpc.health.v1.Health/Check"

pytestmark = [only_sync, pytest.mark.usefixtures("world")]


def echo(request, _context):
    return request


@pytest.fixture
def serve(world, closed_later):
    """Serves functions by their methods, with the interceptors of a kit; returns a channel."""

    def start(functions, kit, executor=ThreadPoolExecutor, interceptors=()):
        services = [unary_service(method, function) for method, function in functions.items()]
        interceptors = kit.server_interceptors() if kit else interceptors
        options = {"workers": 4, "executor": executor, "interceptors": interceptors}
        return world.channel(closed_later(GrpcServer(*services, **options)).target)

    return start


def kit_of(world, **settings):
    return world.keep(rpcwheel.Kit(**settings))


# Another executor


def test_an_executor_without_the_limit_is_reported_once_and_a_problem_until_calls_arrive(
    world, serve, events
):
    kit = kit_of(world, limit=LimitPolicy(name="no executor", max_concurrent=1))
    interceptors = kit.server_interceptors()

    def status():
        (row,) = [row for row in snapshot().limits if row.name == "no executor"]
        return row.limit, row.problem

    def call_with(executor):
        channel = serve({METHOD: echo}, None, executor, interceptors)
        for _ in range(6):
            assert channel.unary_unary(METHOD)(b"x", timeout=WAIT_S) == b"x"

    assert status() == (1, "")
    call_with(ThreadPoolExecutor)
    assert status() == (None, "no effect: the server needs kit.server_executor()")
    call_with(kit.server_executor)
    assert status() == (1, "")
    assert wait_until(lambda: events.of(LimitIneffective))
    assert events.of(LimitIneffective) == [LimitIneffective("no executor")]


def test_the_executor_of_the_kit_is_not_reported_after_health_checks(world, serve, events):
    kit = kit_of(world, **PATIENT)
    channel = serve({HEALTH: echo, METHOD: echo}, kit, kit.server_executor)
    for method in (HEALTH, HEALTH, HEALTH, HEALTH, METHOD, METHOD):
        assert channel.unary_unary(method)(b"x") == b"x"
    kit.close()
    assert not events.of(LimitIneffective)


def test_a_sink_may_block_when_the_executor_is_reported(world, serve):
    gate = Gate()

    def sink(event):
        if isinstance(event, LimitIneffective):
            gate(b"")

    add_sink(sink)
    try:
        channel = serve({METHOD: echo}, kit_of(world, **PATIENT), ThreadPoolExecutor)
        for _ in range(6):
            assert channel.unary_unary(METHOD)(b"x", timeout=WAIT_S) == b"x"
        assert gate.entered.wait(WAIT_S)
    finally:
        gate.opened.set()
        remove_sink(sink)


# The executor as such


def test_the_executor_runs_calls_of_a_server_without_a_limit(serve):
    gate = Gate()
    channel = serve({METHOD: lambda request, _: gate(request)}, None, ServerExecutor)
    calls = [channel.unary_unary(METHOD).future(b"%d" % n, timeout=WAIT_S) for n in range(3)]
    assert gate.entered.wait(WAIT_S)
    gate.opened.set()
    assert [call.result() for call in calls] == [b"0", b"1", b"2"]


def test_the_executor_runs_any_function_as_a_thread_pool_does(world):
    with kit_of(world, **PATIENT).server_executor(2, thread_name_prefix="mine") as executor:
        name = executor.submit(lambda prefix: prefix + threading.current_thread().name, "on ")
        assert name.result(WAIT_S).startswith("on mine")
        assert list(executor.map(str, range(5))) == ["0", "1", "2", "3", "4"]
        assert isinstance(executor, ThreadPoolExecutor)
    with pytest.raises(RuntimeError):
        executor.submit(str)


def test_a_function_of_a_handler_runs_on_the_executor_in_the_context_of_the_call(world, serve):
    """It is not a call, although its context is that of one."""
    executors = []

    def handler(request, _context):
        context = contextvars.copy_context()
        return executors[0].submit(context.run, lambda: request * 2).result(WAIT_S)

    def make(*args, **options):
        executors.append(kit.server_executor(*args, **options))
        return executors[0]

    kit = kit_of(world, **PATIENT)
    assert serve({METHOD: handler}, kit, make).unary_unary(METHOD)(b"x", timeout=WAIT_S) == b"xx"


def test_a_call_waits_for_a_thread_if_the_limit_is_higher(limited):
    server = limited(workers=2, limit=LimitPolicy(max_concurrent=9, max_wait=LONG_S))
    server.held(b"hold")
    server.held(b"hold stream", kind="unary_stream")
    (call,) = server.waiting(b"x")
    (stream,) = server.waiting(b"y", kind="unary_stream")
    server.release(b"hold stream")
    assert (call.result(), stream.result()) == (b"x", [b"y"])


class TwoServers:
    """Two servers with a limit of one call each, on the threads of one executor.

    `gates` hold their handlers, and `served` has the numbers of the servers, 0 and 1, in the order
    in which their handlers began.
    """

    def __init__(self, world, threads):
        self.executor = ServerExecutor(threads)
        self.gates = [Gate(), Gate()]
        self.served = []
        self._servers = [self._serve(kit_of(world, **PATIENT), number) for number in range(2)]
        self.limits = components.of_kind("limit")[-2:]
        self._channels = [world.channel(server.target) for server in self._servers]

    def _serve(self, kit, number):
        def handler(request, _context):
            self.served.append(number)
            return self.gates[number](request)

        return GrpcServer(
            unary_service(METHOD, handler),
            executor=lambda *_, **__: self.executor,
            interceptors=kit.server_interceptors(),
        )

    def call(self, number):
        """Begin a call to a server."""
        return self._channels[number].unary_unary(METHOD).future(b"x", timeout=WAIT_S)

    def close(self):
        """Let all handlers go on, and end the servers."""
        for gate in self.gates:
            gate.opened.set()
        for server in self._servers:
            server.close()


@pytest.fixture
def two_servers(world, closed_later):
    """Makes two servers that share an executor."""
    return lambda threads: closed_later(TwoServers(world, threads))


def test_an_executor_that_two_servers_share_keeps_both_limits(two_servers):
    servers = two_servers(threads=4)
    calls = [servers.call(number) for number in (0, 0, 1, 1)]
    limits = servers.limits
    assert wait_until(lambda: [each.status().waiting for each in limits] == [1, 1])
    assert [each.status().running for each in limits] == [1, 1]
    servers.gates[0].opened.set()
    assert calls[0].result() == calls[1].result() == b"x"
    assert limits[1].status().running == 1
    servers.gates[1].opened.set()
    assert calls[2].result() == calls[3].result() == b"x"


def test_calls_that_wait_are_served_by_the_thread_for_whose_call_they_waited(world, serve):
    served, gate = [], Gate()

    def handler(request, _context):
        gate(request)
        served.append(threading.get_ident())
        if request == b"exits":
            raise SystemExit
        return request

    kit = kit_of(world, **PATIENT)
    method = serve({METHOD: handler}, kit, kit.server_executor).unary_unary(METHOD)
    first = method.future(b"exits", timeout=WAIT_S)
    assert gate.entered.wait(WAIT_S)
    calls = [method.future(b"x", timeout=WAIT_S) for _ in range(9)]
    (limit,) = components.of_kind("limit")[-1:]
    assert wait_until(lambda: limit.status().waiting == 9)
    gate.opened.set()
    assert [call.result() for call in calls] == [b"x"] * 9
    assert len(set(served)) == 1
    assert wait_until(lambda: limit.status().running == 0)
    first.cancel()  # gRPC does not answer a call whose handler exits


def test_servers_take_turns_if_they_share_the_threads_of_an_executor(two_servers):
    servers = two_servers(threads=1)
    calls = [servers.call(0)]
    assert servers.gates[0].entered.wait(WAIT_S)
    calls += [servers.call(0) for _ in range(2)]
    assert wait_until(lambda: servers.limits[0].status().waiting == 2)
    calls.append(servers.call(1))
    assert wait_until(lambda: servers.limits[1].status().running == 1)  # in the queue of the pool
    for gate in servers.gates:
        gate.opened.set()
    assert [call.result() for call in calls] == [b"x"] * 4
    assert servers.served == [0, 1, 0, 0]


def test_a_shutdown_cancels_no_call_that_waits_for_a_thread(two_servers):
    servers = two_servers(threads=1)
    first = servers.call(0)
    assert servers.gates[0].entered.wait(WAIT_S)
    second = servers.call(1)
    assert wait_until(lambda: servers.limits[1].status().running == 1)  # in the queue of the pool
    servers.executor.shutdown(wait=False, cancel_futures=True)
    for gate in servers.gates:
        gate.opened.set()
    assert first.result() == second.result() == b"x"


def test_calls_without_a_limit_hold_all_their_threads_and_probes_have_others(world, serve):
    """Four more than the executor. Such calls may be long polls, which hold a thread for long."""
    started = threading.Semaphore(0)
    gate = Gate()

    def handler(request, _context):
        started.release()
        return gate(request)

    kit = kit_of(world, methods={"/test.Small/*": MethodPolicy(limit=None)}, **PATIENT)
    channel = serve({METHOD: handler, HEALTH: echo, OTHER: echo}, kit, kit.server_executor)
    calls = [channel.unary_unary(METHOD).future(b"x", timeout=2 * WAIT_S) for _ in range(9)]
    for _ in range(8):
        assert started.acquire(timeout=WAIT_S)
    assert channel.unary_unary(HEALTH)(b"ok", timeout=WAIT_S) == b"ok"
    heartbeat = (("rpcwheel-heartbeat", "1"),)
    assert channel.unary_unary(OTHER)(b"ok", timeout=WAIT_S, metadata=heartbeat) == b"ok"
    gate.opened.set()
    for call in calls:
        call.result()


# Its end


def test_a_shutdown_refuses_the_calls_that_wait_and_is_no_overload(limited, events):
    server = limited(**PATIENT)
    (held,) = server.held(b"hold")
    waiting = server.waiting(b"1", b"2")
    server.pool.shutdown(wait=False)
    for call in waiting:
        assert call.error().code() is Code.UNAVAILABLE
        assert call.trailing_metadata()["rpcwheel-refused"] == ""
    assert server.call(b"3").error().code() is Code.UNAVAILABLE
    server.release(b"hold")
    assert held.result() == b"hold"
    assert wait_until(server.is_idle)
    assert server.call(b"4").error().code() is Code.UNAVAILABLE
    assert server.began == [b"hold"]
    assert server.is_idle()
    assert server.refused == {("critical", "closed"): 4}
    assert server.status.problem == ""
    assert not [event for event in events if "Overload" in type(event).__name__]


@pytest.mark.parametrize(
    ("method", "settings"),
    [(HEALTH, PATIENT), (UNARY_UNARY, {"methods": {OTHER: MethodPolicy(limit=1)}})],
    ids=["never limited", "without a limit"],
)
def test_a_server_refuses_also_calls_without_a_limit_after_the_shutdown_of_its_executor(
    limited, method, settings
):
    server = limited(unary_service(HEALTH, echo), **settings)
    assert server.call(b"x", method=method, timeout=WAIT_S).result() == b"x"
    server.pool.shutdown()
    for _ in range(3):
        call = server.call(b"x", method=method, timeout=WAIT_S)
        assert call.error().code() is Code.UNAVAILABLE
        assert call.details() == "refused before its handler ran: the server is being stopped"


@contextlib.contextmanager
def no_thread_starts():
    """No thread of a server can be started in this block."""
    start = threading.Thread.start

    def fail(thread):
        if thread.name.startswith("grpc-server"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        yield


def test_calls_are_refused_while_no_thread_can_be_started(limited):
    server = limited(**PATIENT)
    with no_thread_starts():
        for _ in range(2):
            assert server.call(b"refused").error().code() is Code.UNAVAILABLE
    assert server.call(b"next").result() == b"next"
    assert wait_until(server.is_idle)
    assert server.began == [b"next"]


def test_a_call_without_a_limit_that_got_no_thread_does_not_run_later(limited):
    """The pool has queued it, and gRPC runs the handler of an ended call with a request stream."""
    entered = []

    def join(requests, _context):
        entered.append("handler")
        return b"".join(requests)

    handlers = {"Join": grpc.stream_unary_rpc_method_handler(join)}
    own = grpc.method_handlers_generic_handler("test.Own", handlers)
    server = limited(own, methods={OTHER: MethodPolicy(limit=1)})
    with no_thread_starts():
        refused = server.call(b"refused", "stream_unary", method="/test.Own/Join")
        assert refused.error().code() is Code.UNAVAILABLE
    following = server.call(b"next", "stream_unary", method="/test.Own/Join")
    assert following.result() == b"next"
    assert entered == ["handler"]


def test_a_call_is_refused_or_run_once_if_a_thread_seems_not_to_start(limited, monkeypatch):
    """The pool queues a call first, so that another thread may start it."""
    start = threading.Thread.start

    def fail(thread):
        start(thread)
        if thread.name.startswith("grpc-server"):
            raise RuntimeError("can't start new thread")

    server = limited(workers=40, limit=LimitPolicy(max_concurrent=40))
    monkeypatch.setattr(threading.Thread, "start", fail)
    calls = [server.call(b"%d" % number) for number in range(40)]
    answered = [call.result() for call in calls if call.code() is Code.OK]
    monkeypatch.undo()
    assert wait_until(server.is_idle)
    assert sorted(server.began) == sorted(answered)
    assert server.call(b"next").result() == b"next"


# Calls that need not run


def test_a_call_with_less_time_left_than_its_method_takes_is_refused(limited):
    for scale in (1, 12):  # on a busy machine, the first deadline may pass before the call waits
        server = limited(**PATIENT)
        slow = server.call(b"hold slow", method=OTHER)
        server.wait_for(b"hold slow")
        time.sleep(0.6 * scale)  # the shortest duration of the method so far
        server.release(b"hold slow")
        slow.result()
        server.held(b"hold")
        late = server.call(b"late", method=OTHER, timeout=0.5 * scale)
        assert wait_until(lambda: server.status.waiting == 1 or late.done())  # noqa: B023
        next_call = server.call(b"next")
        assert wait_until(lambda: server.status.waiting == 2 or late.done())  # noqa: B023
        in_time = not late.done()
        server.release(b"hold")
        if in_time:
            break
    assert late.error().code() in (Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED)
    assert next_call.result() == b"next"
    assert wait_until(lambda: server.refused == {("critical", "short_deadline"): 1})
    assert b"late" not in server.began


@pytest.mark.parametrize("kind", ["stream_unary", "unary_stream"])
def test_a_stream_that_is_canceled_while_it_waits_for_a_thread_does_not_run(limited, kind):
    server, gate = limited(workers=1, **PATIENT), Gate()
    server.pool.submit(gate, b"")
    call = server.call(b"gone", kind)
    assert wait_until(lambda: server.status.streams == 1)  # in the queue of the pool
    call.cancel()
    unknown = server.call(b"", method="/test.Shop/Unknown")  # the server reads the end before it
    assert unknown.error().code() is Code.UNIMPLEMENTED
    gate.opened.set()
    server.call(b"last", kind).result()
    assert b"gone" not in server.began


def test_a_call_that_is_canceled_while_it_waits_is_not_refused_and_leaves_its_place(limited):
    server = limited(server={"maximum_concurrent_rpcs": 2}, **PATIENT)
    server.held(b"hold")
    (gone,) = server.waiting(b"gone")
    gone.cancel()
    unknown = server.call(b"", method="/test.Shop/Unknown")  # the server reads the end before it
    assert unknown.error().code() is Code.UNIMPLEMENTED
    late = server.call(b"late")
    server.pool.shutdown(wait=False)
    assert late.error().code() is Code.UNAVAILABLE
    assert server.refused == {("critical", "closed"): 1}


def test_a_call_that_has_waited_and_is_canceled_before_a_thread_takes_it_leaves_its_place(limited):
    server, gate = limited(workers=1, **PATIENT), Gate()
    server.held(b"hold")
    (gone,) = server.waiting(b"gone")
    server.pool.submit(gate, b"")
    server.release(b"hold")
    assert gate.entered.wait(WAIT_S)
    assert server.status.running == 1  # in the queue of the pool
    gone.cancel()
    unknown = server.call(b"", method="/test.Shop/Unknown")  # the server reads the end before it
    assert unknown.error().code() is Code.UNIMPLEMENTED
    gate.opened.set()
    assert server.call(b"next").result() == b"next"


# Other


def test_a_method_with_a_thread_pool_of_its_own_is_not_limited(world, serve):
    """gRPC submits its calls there."""
    with ThreadPoolExecutor(2, thread_name_prefix="own") as own:

        def handler(request, _context):
            return threading.current_thread().name.encode()

        handler.experimental_thread_pool = own
        kit = kit_of(world, **PATIENT)
        channel = serve({METHOD: handler}, kit, kit.server_executor)
        assert channel.unary_unary(METHOD)(b"x", timeout=WAIT_S).startswith(b"own")


def test_a_call_is_refused_although_the_timer_of_the_kit_is_stopped(limited, manual_timer):
    manual_timer.stop()
    policy = LimitPolicy(max_concurrent=1, max_wait=SHORT_S)
    server = limited(limit=policy, timer=manual_timer)
    server.held(b"hold")
    (first,) = server.waiting(b"first")
    time.sleep(2 * SHORT_S)
    while not first.done():  # each call that arrives refuses the late ones
        server.call(b"second", timeout=0.2).error()
    assert first.error().code() is Code.RESOURCE_EXHAUSTED
    server.release(b"hold")
    assert wait_until(server.is_idle)


def test_a_forked_child_reports_no_limit_of_its_parent():
    # Without a server: gRPC may crash a child of a process whose server waits (docs/grpcio.md).
    interceptors = rpcwheel.Kit(limit=1).server_interceptors()
    assert components.of_kind("limit")
    assert holds_in_child(lambda: not components.of_kind("limit"))
    del interceptors
