"""Behavior of `grpc` clients that rpcwheel works around or needs.

A canary passes as long as grpcio behaves in this way. If one fails, grpcio has changed: its
docstring names the code of rpcwheel that is then wrong or no longer needed. Delete its row in
docs/grpcio.md too.
"""

import contextlib
import gc
import json
import socket
import time
import weakref

import grpc
import pytest

from fixtures.certificates import made
from fixtures.client_interceptors import interceptor
from fixtures.grpc_servers import IMPATIENT, GrpcServer, unary_service
from fixtures.grpcio import since
from fixtures.ports import has_ipv6
from fixtures.programs import run_program
from fixtures.shop import FOR_EVER, STREAM_UNARY, UNARY_UNARY, Hang
from fixtures.small_servers import METHOD, serving
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._grpc.calls import TOO_LARGE_DETAILS
from rpcwheel._grpc.connectivity import core_state
from rpcwheel.instance import grpc_target, joined


def intercepted(channel, act, method=UNARY_UNARY):
    """The method of a channel with an interceptor that calls `act`."""
    channel = grpc.intercept_channel(channel, interceptor(act, "unary_unary", "stream_unary"))
    return channel.unary_unary(method) if method == UNARY_UNARY else channel.stream_unary(method)


def failure_of(target, **options) -> grpc.RpcError:
    with (
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
        pytest.raises(grpc.RpcError) as failed,
    ):
        channel.unary_unary(METHOD)(b"", timeout=WAIT_S, **options)
    return failed.value


def test_a_continuation_returns_the_error_of_a_blocking_call_and_does_not_raise_it(
    shop, shop_channel
):
    """interceptors/client.py checks the returned object instead of catching `RpcError`."""
    got = []

    def act(continuation, details, request):
        got.append(continuation(details, request))
        return got[0]

    shop.then("UNAVAILABLE")
    with pytest.raises(grpc.RpcError) as failed:
        intercepted(shop_channel, act)(b"x")
    assert got == [failed.value]


def test_each_call_of_a_continuation_gets_the_whole_timeout(shop, shop_channel):
    """interceptors/client.py passes each attempt what is left of one deadline."""

    def thrice(continuation, details, request):
        return [continuation(details, request) for _ in range(3)][-1]

    shop.then(Hang(), Hang(), Hang())
    begun = time.monotonic()
    with pytest.raises(grpc.RpcError) as failed:
        intercepted(shop_channel, thrice)(b"x", timeout=0.2)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - begun > 0.4


def test_a_naive_retry_sends_an_empty_request_stream_and_succeeds():
    """call/replay.py keeps the requests that were sent. Other streams are not retried."""
    seen = []

    def fail_once(requests, context):
        seen.append(list(requests))
        if len(seen) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "once")
        return b"stored"

    def retry_once(continuation, details, requests):
        first = continuation(details, requests)
        return first if first.code() is grpc.StatusCode.OK else continuation(details, requests)

    with (
        serving(grpc.stream_unary_rpc_method_handler(fail_once)) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        push = intercepted(channel, retry_once, METHOD)
        assert push(iter([b"0", b"1", b"2"])) == b"stored"
    assert seen == [[b"0", b"1", b"2"], []]


@pytest.mark.parametrize("method", [UNARY_UNARY, STREAM_UNARY])
def test_only_the_name_of_the_continuation_tells_whether_the_caller_blocks(
    shop, shop_channel, method
):
    """`is_blocking_unary` needs it: an interceptor must not wait in `.future()`."""
    names = []

    def act(continuation, details, request):
        names.append(continuation.__qualname__)
        return continuation(details, request)

    call = intercepted(shop_channel, act, method)
    request = b"x" if method == UNARY_UNARY else iter([b"x"])
    call(request)
    request = b"x" if method == UNARY_UNARY else iter([b"x"])
    call.future(request).result()
    blocking, future = (name.split(".")[1:] for name in names)
    assert blocking == ["_with_call", "<locals>", "continuation"]
    assert future == ["future", "<locals>", "continuation"]


def test_call_details_are_a_named_tuple_whose_metadata_may_be_none(shop, shop_channel):
    """`Details` in _grpc/calls.py can be changed, and has one form of metadata."""
    got = []

    def act(continuation, details, request):
        got.append(details)
        return continuation(details, request)

    intercepted(shop_channel, act)(b"x")
    assert got[0]._fields == (
        "method",
        "timeout",
        "metadata",
        "credentials",
        "wait_for_ready",
        "compression",
    )
    assert got[0] == (UNARY_UNARY, None, None, None, None, None)


def test_the_attempts_header_may_be_sent_by_an_application(shop, shop_channel):
    """`with_attempt` in call/metadata.py needs it.

    Names that begin with "grpc-" are reserved by gRPC. While its own retries are enabled (the
    default), gRPC removes this one, so a retry also sends `x-retry-attempt`.
    """
    header = [("grpc-previous-rpc-attempts", "2")]
    shop_channel.unary_unary(UNARY_UNARY)(b"x", metadata=header)
    assert shop.calls[0].metadata["grpc-previous-rpc-attempts"] == "2"
    with grpc.insecure_channel(shop.target) as by_default:
        by_default.unary_unary(UNARY_UNARY)(b"x", metadata=header)
    assert "grpc-previous-rpc-attempts" not in shop.calls[1].metadata


RETRIES = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 2,
    "initialBackoff": "9s", "maxBackoff": "9s", "backoffMultiplier": 1,
    "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""


@since(1, 72, reason="a pushback of 0 is followed")
@pytest.mark.parametrize(
    ("pushback_ms", "timeout", "attempts"), [("1", WAIT_S, 2), ("0", 0.5, 1)], ids=["1", "0"]
)
def test_the_retries_of_grpc_hang_at_a_pushback_of_0(pushback_ms, timeout, attempts):
    """`ServerLimit.refusal` in limit/server.py sends at least 1."""
    seen = []

    def refuse(_, context):
        seen.append(1)
        context.set_trailing_metadata([("grpc-retry-pushback-ms", pushback_ms)])
        context.abort(grpc.StatusCode.UNAVAILABLE, "")

    options = [("grpc.service_config", RETRIES)]
    with (
        serving(grpc.unary_unary_rpc_method_handler(refuse)) as target,
        grpc.insecure_channel(target, options) as channel,
        pytest.raises(grpc.RpcError),
    ):
        channel.unary_unary(METHOD)(b"", timeout=timeout)
    assert len(seen) == attempts


def test_a_timeout_of_the_service_config_is_not_sent_to_the_server(shop):
    """`DeadlinePolicy.timeout` sets the timeout of each call instead of that option.

    The option also expires early (grpc #34547), by 1.7 s here. It differs from machine to machine.
    """
    config = json.dumps({"methodConfig": [{"name": [{}], "timeout": "60s"}]})
    options = [*IMPATIENT, ("grpc.service_config", config)]
    with grpc.insecure_channel(shop.target, options=options) as channel:
        channel.unary_unary(UNARY_UNARY)(b"x")
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=60)
    without, given = (seen.time_remaining for seen in shop.calls)
    assert without is None
    assert 0 < given < FOR_EVER


@pytest.mark.parametrize(
    ("target", "details"),
    [
        ("127.0.0.1:1", "failed to connect to all addresses"),
        pytest.param(
            *("dns:///localhost:no-port", "errors resolving "),
            marks=since(1, 83, reason="a name that is no port is taken for port 0"),
        ),
        ("ipv4:", "empty address list"),
    ],
    ids=["refused", "not resolved", "no address"],
)
def test_a_call_without_a_connection_differs_only_in_its_details(target, details):
    """A server can send the same text and metadata, so they do not prove that none got the call."""
    failure = failure_of(target)
    both = failure.trailing_metadata(), failure.initial_metadata()
    assert failure.code() is grpc.StatusCode.UNAVAILABLE
    assert failure.details().startswith(details)
    assert both == ((), ())


SPIN = """
import threading, grpc
from fixtures.small_servers import METHOD, serving
from fixtures.waiting import WAIT_S, Gate

def fail():
    raise ValueError("of the user's")

gate, raised = Gate(), threading.Event()
threading.excepthook = lambda _: raised.set()
with serving(grpc.unary_unary_rpc_method_handler(gate)) as target:
    channel = grpc.insecure_channel(target)
    call = channel.unary_unary(METHOD)
    first = call.future(b"")
    assert gate.entered.wait(WAIT_S)
    assert first.add_callback(fail)
    gate.opened.set()
    first.result(WAIT_S)
    print("spin thread:", "dead" if raised.wait(WAIT_S) else "alive", flush=True)
    second = call.future(b"", timeout=0.2)
    try:
        second.result(1)
        print("next call: answered", flush=True)
    except grpc.FutureTimeoutError:
        print("next call: hangs", flush=True)
    import os
    os._exit(0)   # `close` would wait for that thread
"""


def test_a_callback_that_raises_stops_the_thread_of_its_channel():
    """Callbacks that rpcwheel gives to gRPC hand the work to an executor.

    A `functools.partial` is caught; with any other callable, gRPC's handler itself fails on
    `callback.func`. This runs in a separate process, because the channel cannot even be closed.
    """
    output, errors = run_program(SPIN)
    assert output.splitlines() == ["spin thread: dead", "next call: hangs"], errors


REFUSED_THREAD = """
import os, threading, grpc
from grpc._cython.cygrpc import ForkManagedThread
from fixtures.small_servers import METHOD, serving

def refuse(thread):
    raise RuntimeError("can't start new thread")

def show(name, call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(1)
    print(f"{name}: {'hangs' if thread.is_alive() else 'ends'}", flush=True)

with serving(grpc.unary_unary_rpc_method_handler(lambda request, context: request)) as target:
    channel = grpc.insecure_channel(target)
    method = channel.unary_unary(METHOD)
    start, ForkManagedThread.start = ForkManagedThread.start, refuse
    try:
        method.future(b"")
    except RuntimeError as error:
        print(error)
    ForkManagedThread.start = start
    show("future", lambda: method.future(b"", timeout=0.2).exception())
    show("stream", lambda: list(channel.unary_stream(METHOD)(b"", timeout=0.2)))
    print(f"blocking call: {method(b'answered').decode()}", flush=True)
    show("close", channel.close)
    os._exit(0)
"""


def test_a_thread_that_is_refused_once_is_never_started():
    """docs/grpcio.md tells users to leave room below the limit of threads."""
    output, errors = run_program(REFUSED_THREAD)
    lines = ["can't start new thread", "future: hangs", "stream: hangs"]
    assert output.splitlines() == [*lines, "blocking call: answered", "close: hangs"], errors


def test_a_host_named_like_a_scheme_is_read_as_a_scheme(tmp_path, monkeypatch):
    """`grpc_target` in instance.py writes the scheme of each target."""
    monkeypatch.chdir(tmp_path)
    with GrpcServer(place="unix:50051") as server:
        assert failure_of(server.target).code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_target_that_names_its_scheme_has_the_authority_and_tls_name_of_host_and_port():
    """`grpc_target` needs neither `grpc.default_authority` nor `ssl_target_name_override`."""
    certificates, authorities = made(), []

    def answer(request, context):
        authorities.append(context._rpc_event.call_details.host.decode())
        return request

    settings = {"credentials": certificates.server_credentials()}
    for host in ("localhost", "127.0.0.1", "::1") if has_ipv6() else ("localhost", "127.0.0.1"):
        with GrpcServer(unary_service(METHOD, answer), place=joined(host, 0), **settings) as server:
            for target in (joined(host, server.port), grpc_target(host, server.port)):
                with grpc.secure_channel(target, certificates.channel_credentials()) as channel:
                    channel.unary_unary(METHOD)(b"", timeout=WAIT_S)
        assert authorities == [joined(host, server.port)] * 2
        authorities.clear()


def test_over_tls_a_list_of_addresses_matches_no_certificate():
    """The etcd client connects to one member at a time."""
    certificates = made()
    with GrpcServer(credentials=certificates.server_credentials()) as server:
        codes, address = [], server.target
        for target in (f"ipv4:{address}", f"ipv4:{address},{address}"):
            credentials = certificates.channel_credentials()
            with (
                grpc.secure_channel(target, credentials, options=IMPATIENT) as channel,
                pytest.raises(grpc.RpcError) as failed,
            ):
                channel.unary_unary(METHOD)(b"", timeout=WAIT_S)
            codes.append(failed.value.code())
        assert codes == [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE]
        assert "Hostname Verification Check failed" in failed.value.details()


def test_a_channel_of_grpc_has_no_get_state():
    """`core_state` in _grpc/connectivity.py reads the state from gRPC's core."""
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        assert not hasattr(channel, "get_state")


def test_a_channel_that_failed_to_connect_stays_in_transient_failure_while_it_tries_again():
    """A balanced channel takes TRANSIENT_FAILURE for a server that cannot be reached."""
    failing, attempts = grpc.ChannelConnectivity.TRANSIENT_FAILURE, []
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        grpc.insecure_channel(target_of(server), options=IMPATIENT) as channel,
    ):
        server.setblocking(False)

        def refuse_attempts() -> None:
            with contextlib.suppress(BlockingIOError):
                server.accept()[0].close()
                attempts.append(core_state(channel))

        wait_until(lambda: refuse_attempts() or core_state(channel, try_to_connect=True) is failing)
        attempts.clear()
        wait_until(lambda: refuse_attempts() or len(attempts) >= 5)
        assert set(attempts) == {failing}


def target_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_the_status_of_a_call_is_in_its_state_which_does_not_keep_the_call_alive(shop_channel):
    """_grpc/counted.py reads the status there, of calls that their caller has dropped too."""
    call = shop_channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    state, dropped = call._state, weakref.ref(call)
    assert call.result() == b"x"
    del call
    gc.collect()
    assert (state.code, dropped()) == (grpc.StatusCode.OK, None)


def test_a_request_that_cannot_be_sent_ends_with_a_status(shop, shop_channel):
    """`INVALID_REQUEST_DETAILS` of _grpc/calls.py: circuit breakers do not count such calls."""

    def raising(_):
        raise LookupError

    method = shop_channel.unary_unary(UNARY_UNARY)
    cases = (
        (shop_channel.unary_unary(UNARY_UNARY, request_serializer=raising), b"x", None),
        (method, b"x", [("Not-A-Key", "")]),
        (shop_channel.stream_unary(STREAM_UNARY), map(raising, b"x"), None),
    )
    ends = []
    for call, request, metadata in cases:
        with pytest.raises(grpc.RpcError) as failed:
            call(request, metadata=metadata)
        ends.append((failed.value.code().name, failed.value.details()))
    assert ends == [
        ("INTERNAL", "Exception serializing request!"),
        ("INTERNAL", "Invalid metadata"),
        ("UNKNOWN", "Exception iterating requests!"),
    ]
    with pytest.raises(TypeError):
        method("no bytes")


def test_a_message_that_is_too_large_ends_a_call_with_resource_exhausted(shop):
    """`TOO_LARGE_DETAILS` of _grpc/calls.py: circuit breakers do not count such calls."""
    options = [("grpc.max_send_message_length", 10), ("grpc.max_receive_message_length", 5)]
    with grpc.insecure_channel(shop.target, options=options) as channel:
        method = channel.unary_unary(UNARY_UNARY)
        ends = []
        for size in (11, 6):
            with pytest.raises(grpc.RpcError) as failed:
                method(b"x" * size)
            ends.append((failed.value.code().name, failed.value.details()))
    assert {code for code, _ in ends} == {"RESOURCE_EXHAUSTED"}
    assert all(TOO_LARGE_DETAILS.match(details) for _, details in ends)


WRONG_METADATA = """
import sys, time
import grpc
from fixtures.leaks import descriptors

def sockets():
    return sum(target.startswith("socket:") for _, target in descriptors())

for value, wait_s in (("5", 20), (5, 0.5)):
    before = sockets()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.insecure_channel(sys.argv[1], options=options)
    method = channel.unary_unary("/test.Shop/UnaryUnary")
    method(b"x", timeout=20)
    try:
        method(b"x", metadata=[("a", value)], timeout=20)
    except TypeError:
        pass
    channel.close()
    end_s = time.monotonic() + wait_s
    while sockets() > before and time.monotonic() < end_s:
        time.sleep(0.01)
    print(sockets() > before)
"""


def test_wrong_metadata_leaves_the_connection_of_a_closed_channel_open(shop):
    """In a process of its own: the connection stays until that ends."""
    output, errors = run_program(WRONG_METADATA, shop.target)
    assert output.splitlines() == ["False", "True"], errors


class WallClock:
    """Replaces the module `time` in grpcio: a wall clock that is set while a call runs."""

    ahead_s = 0.0
    step_s = 0.0
    """How far the clock is set forward each time it is read."""

    def time(self) -> float:
        self.ahead_s += self.step_s
        return time.time() + self.ahead_s

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


def test_a_wall_clock_that_is_set_changes_timeouts(monkeypatch, shop, shop_channel):
    """If this fails, calls without policies need no warning in docs/grpcio.md."""
    clock = WallClock()
    for module in ("grpc._channel", "grpc._common"):
        monkeypatch.setattr(f"{module}.time", clock)
    method = shop_channel.unary_unary(UNARY_UNARY)
    shop.then(Hang())
    call = method.future(b"", timeout=1000.0)
    clock.ahead_s = -3600.0
    assert call.time_remaining() > 3600
    clock.step_s = 3600.0
    with pytest.raises(grpc.FutureTimeoutError):  # at once
        call.result(timeout=1800.0)
    assert not call.done()  # its deadline has not changed
    call.cancel()
    clock.step_s, clock.ahead_s = 0.0, -3600.0  # set back before gRPC's core gets the deadline
    with pytest.raises(grpc.RpcError) as failed:
        method(b"", timeout=1800.0)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
