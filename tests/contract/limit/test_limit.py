"""Rules of servers with a limit, in both worlds."""

import contextlib
import json
import random

import grpc
import pytest

from fixtures import foreign_grpc_interceptor, foreign_opentelemetry
from fixtures.leaks import no_garbage_collector
from fixtures.limited_servers import LONG_S, SHORT_S, call_on
from fixtures.shop import SERVICE, UNARY_UNARY
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel.call import MethodPolicy, current_criticality, current_deadline
from rpcwheel.events import OverloadBegan, OverloadEnded
from rpcwheel.limit import LimitPolicy, RatePolicy
from rpcwheel.rpc import Criticality

Code = grpc.StatusCode
OTHER = f"/{SERVICE}/Other"
PATIENT = {"limit": LimitPolicy(max_concurrent=1, max_wait=LONG_S)}
IMPATIENT = {"limit": LimitPolicy(max_concurrent=1, max_wait=SHORT_S)}
TWO = RatePolicy(rate=0.001, burst=2)
"""A rate at which two calls run at once, and no third one in a test."""

each_streaming_kind = pytest.mark.parametrize(
    "kind", ["unary_stream", "stream_unary", "stream_stream"]
)


def echo(world, kind="unary_unary"):
    """A handler that returns the request."""
    if world.name == "sync":
        return getattr(grpc, f"{kind}_rpc_method_handler")(lambda request, _: request)

    async def behavior(request, _):
        return request

    return getattr(grpc, f"{kind}_rpc_method_handler")(behavior)


def is_refusing(world, target) -> bool:
    """Whether a server accepts no connections."""
    call = call_on(world, world.channel(target), b"x", timeout=1.0)  # it may be accepted, and wait
    return call.error().code() is Code.UNAVAILABLE


def is_refused(call, nonce="") -> bool:
    """Whether a call was refused by the limit, with all that belongs to it."""
    if not call.one_response:
        with pytest.raises(grpc.RpcError):
            call.read()  # there is no response before the error
    code, metadata = call.error().code(), call.trailing_metadata()
    assert code is Code.RESOURCE_EXHAUSTED
    assert call.details().startswith("refused before its handler ran")
    assert metadata["rpcwheel-refused"] == nonce
    return 500 <= int(metadata["grpc-retry-pushback-ms"]) <= 1500


# What waits, and what is refused


def test_a_call_above_the_limit_waits_until_another_one_has_ended(limited):
    server = limited(limit=LimitPolicy(max_concurrent=2, max_wait=LONG_S))
    server.held(b"hold 1", b"hold 2")
    (call,) = server.waiting(b"later")
    assert server.status.running == 2
    assert b"later" not in server.began
    server.release(b"hold 1")
    assert call.result() == b"later"
    assert wait_until(lambda: (server.status.running, server.status.waiting) == (1, 0))


def test_a_call_that_has_waited_for_too_long_is_refused_without_its_handler(limited):
    server = limited(**IMPATIENT)
    (held,) = server.held(b"hold")
    assert is_refused(server.call(b"late", nonce="7-1"), "7-1")
    assert is_refused(server.call(b"late"))
    assert server.refused == {("critical", "waited"): 2}
    server.release(b"hold")
    assert held.result() == b"hold"
    assert server.call(b"next").result() == b"next"
    assert server.began == [b"hold", b"next"]


def test_the_pushback_of_a_refusal_is_that_of_the_policy(limited):
    server = limited(limit=LimitPolicy(max_concurrent=1, max_wait=0.001, pushback=20.0))
    server.held(b"hold")
    call = server.call(b"x")
    assert call.error().code() is Code.RESOURCE_EXHAUSTED
    assert 10_000 <= int(call.trailing_metadata()["grpc-retry-pushback-ms"]) <= 30_000


NATIVE_RETRIES = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3,
    "initialBackoff": "9s", "maxBackoff": "9s", "backoffMultiplier": 1,
    "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}"""


@pytest.mark.parametrize("pushback", [0.0001, 0.02])
def test_a_refusal_has_no_response_and_the_retries_of_grpc_follow_its_pushback(limited, pushback):
    """gRPC does not retry a call of which anything but the status has arrived (gRFC A6)."""
    server = limited(limit=LimitPolicy(max_concurrent=1, max_wait=0.001, pushback=pushback))
    server.held(b"hold")
    options = [("grpc.service_config", NATIVE_RETRIES)]
    with grpc.insecure_channel(server.target, options) as channel:
        call = channel.unary_unary(UNARY_UNARY, response_deserializer=json.loads)
        with pytest.raises(grpc.RpcError) as refused:
            call(b"x", timeout=WAIT_S)
    assert refused.value.code() is Code.RESOURCE_EXHAUSTED
    assert server.refused == {("critical", "waited"): 3}


def test_streams_run_beside_handlers_and_are_refused_on_arrival_while_others_wait(limited):
    server = limited(limit=LimitPolicy(max_concurrent=1, max_streams=2, max_wait=LONG_S))
    server.held(b"hold")
    (waiting,) = server.waiting(b"later")
    streams = server.held(b"hold 1", b"hold 2", kind="unary_stream")
    assert (server.status.running, server.status.streams, server.status.waiting) == (1, 2, 1)
    assert is_refused(server.call(b"y", "unary_stream"))
    assert wait_until(lambda: server.status.problem == "overloaded: it has refused 1 call")
    server.release(b"hold 1", b"hold 2", b"hold")
    assert waiting.result() == b"later"
    assert [stream.read() for stream in streams] == [b"hold 1", b"hold 2"]


@each_streaming_kind
def test_a_stream_above_max_streams_is_refused_at_once(limited, kind):
    server = limited(limit=LimitPolicy(max_concurrent=1, max_streams=1, max_wait=LONG_S))
    (held,) = server.held(b"hold", kind=kind)
    assert is_refused(server.call(b"x", kind, nonce="9"), "9")
    assert server.refused == {("critical", "streams"): 1}
    assert (server.status.running, server.status.streams) == (0, 1)
    assert server.call(b"unary").result() == b"unary"  # the limit is another one
    server.release(b"hold")
    assert held.result() in (b"hold", [b"hold"])
    assert wait_until(server.is_idle)
    assert server.call(b"x", kind).result() in (b"x", [b"x"])


def test_quick_calls_do_not_wait_for_slow_handlers_if_the_limit_is_adaptive(limited):
    server = limited(limit=LimitPolicy(max_wait=LONG_S), workers=32)
    limit = server.status.limit
    server.held(*(b"hold %d" % number for number in range(limit)))
    for _ in range(3):
        assert server.call(b"other", method=OTHER).result() == b"other"
    assert wait_until(lambda: server.status.running == limit)
    server.waiting(b"later")


# No end of a call leaves it counted


def cancel(call) -> None:
    call.cancel()


def let_fail(call) -> None:
    assert call.error().code() in (
        Code.UNKNOWN,
        Code.ABORTED,
        Code.INTERNAL,
        Code.DEADLINE_EXCEEDED,
    )


ENDINGS = {
    "canceled": (b"hold", cancel, {}),
    "deadline": (b"hold", let_fail, {"timeout": 0.3}),
    "raises": (b"raise", let_fail, {}),
    "aborts": (b"abort", let_fail, {}),
    "response not serialized": (b"bad", let_fail, {}),
    "request not deserialized": (b"bad", let_fail, {"method": OTHER}),
}


EACH_ENDING = [
    *(("unary_unary", ending) for ending in ENDINGS),
    *(("unary_stream", ending) for ending in ENDINGS if "request" not in ending),
    *(("stream_stream", ending) for ending in ENDINGS if "request" not in ending),
]


@pytest.mark.parametrize(("kind", "ending"), EACH_ENDING)
def test_a_call_that_ends_in_any_way_counts_no_longer(limited, kind, ending):
    request, end, options = ENDINGS[ending]
    server = limited(limit=LimitPolicy(max_concurrent=1, max_streams=1, max_wait=LONG_S))
    call = server.call(request, kind, **options)
    assert wait_until(lambda: request in server.began or call.done())
    end(call)
    server.release(b"hold")
    assert wait_until(server.is_idle)
    assert server.call(b"next", kind).result() in (b"next", [b"next"])


@pytest.mark.parametrize("ending", ["canceled", "deadline"])
def test_a_call_that_ends_while_it_waits_does_not_run(limited, ending):
    _, end, options = ENDINGS[ending]
    server = limited(**PATIENT)
    server.held(b"hold")
    gone = server.call(b"gone", **options)
    assert wait_until(lambda: server.status.waiting == 1 or gone.done())
    end(gone)
    unknown = server.call(b"", method="/test.Shop/Unknown")  # the server reads the end before it
    assert unknown.error().code() is Code.UNIMPLEMENTED
    call = server.call(b"next")
    server.release(b"hold")
    assert call.result() == b"next"
    assert wait_until(server.is_idle)
    assert server.began == [b"hold", b"next"]


def test_a_call_that_is_canceled_waits_no_longer(limited):
    server = limited(**PATIENT)
    server.held(b"hold")
    calls = server.waiting(b"1", b"2", b"3")
    calls[1].cancel()
    assert wait_until(lambda: server.status.waiting == 2)
    server.release(b"hold")
    assert (calls[0].result(), calls[2].result()) == (b"1", b"3")


def test_a_client_that_sends_no_request_holds_its_place_until_its_call_ends(world, limited):
    server = limited(**PATIENT)
    silent = world.call(server.channel, "stream_unary", method=UNARY_UNARY, open_requests=True)
    assert wait_until(lambda: server.status.running == 1)
    (call,) = server.waiting(b"next")
    silent.cancel()
    assert call.result() == b"next"
    assert wait_until(server.is_idle)


@no_garbage_collector()
@pytest.mark.parametrize("fate", ["answered", "waited", "refused"])
def test_a_call_that_has_ended_leaves_no_stream_open(world, limited, fate):
    """gRPC's core closes the stream when Python has freed the call."""
    options = {"options": [("grpc.max_concurrent_streams", 8)]}
    limit = LimitPolicy(max_concurrent=1, max_wait=LONG_S, rate=0.001 if fate == "refused" else 1e6)
    server = limited(workers=2, server=options, limit=limit)
    for number in range(20):
        if fate == "waited":
            (held,) = server.held(b"hold %d" % number)
            (call,) = server.waiting(b"x")
            server.release(b"hold %d" % number)
            assert held.result() == b"hold %d" % number
        else:
            call = server.call(b"x")
        if fate == "refused" and number > 0:
            assert call.error().code() is Code.RESOURCE_EXHAUSTED
        else:
            assert call.result() == b"x"


# Order


def test_the_more_critical_call_is_served_first_and_then_the_older_one(limited):
    server = limited(**PATIENT)
    server.held(b"hold")
    calls = []
    levels = ("sheddable", "sheddable_plus", "", "critical_plus", "critical", "sheddable", "most")
    for level in levels:
        calls += server.waiting(b"%s %d" % (level.encode(), len(calls)), criticality=level)
    twice = (("rpcwheel-criticality", "critical_plus"),) * 2
    calls += server.waiting(b"twice 7", metadata=twice)
    server.release(b"hold")
    for call in calls:
        call.result()
    assert server.began[1:] == [
        b"critical_plus 3",
        b" 2",
        b"critical 4",
        b"most 6",  # what is not valid counts as none
        b"twice 7",
        b"sheddable_plus 1",
        b"sheddable 0",
        b"sheddable 5",
    ]


def test_callers_get_at_most_the_highest_criticality_that_the_server_believes(limited):
    policy = LimitPolicy(max_concurrent=1, max_wait=LONG_S, max_criticality="sheddable_plus")
    server = limited(limit=policy)
    server.held(b"hold")
    first = server.waiting(b"first", criticality="sheddable_plus")
    second = server.waiting(b"second", criticality="critical_plus")
    last = server.waiting(b"last", criticality="sheddable")
    server.release(b"hold")
    for call in (*first, *second, *last):
        call.result()
    assert server.began == [b"hold", b"first", b"second", b"last"]


class DeniesFirst:
    """An interceptor of another package that refuses the first call, with a handler of its own."""

    def __init__(self, world):
        self._is_aio, self._seen = world.name == "aio", 0

    def intercept_service(self, continuation, details):
        self._seen += 1
        is_denied = self._seen == 1
        if not self._is_aio:
            return self._denied() if is_denied else continuation(details)
        return self._intercept(continuation, details, is_denied=is_denied)

    async def _intercept(self, continuation, details, *, is_denied):
        return self._denied() if is_denied else await continuation(details)

    def _denied(self):
        async def deny_on_loop(_, context):
            await context.abort(Code.UNAUTHENTICATED, "")

        def deny(_, context):
            context.abort(Code.UNAUTHENTICATED, "")

        return grpc.unary_unary_rpc_method_handler(deny_on_loop if self._is_aio else deny)


def test_a_stream_counts_as_one_although_another_handler_has_refused_one_before(world, limited):
    denies = type("Denies", (DeniesFirst, world.grpc.ServerInterceptor), {})(world)
    server = limited(after=(denies,), limit=LimitPolicy(max_concurrent=1, max_streams=1))
    assert server.call(b"x", "unary_stream").error().code() is Code.UNAUTHENTICATED
    server.held(b"hold", kind="unary_stream")
    assert (server.status.running, server.status.streams) == (0, 1)
    assert is_refused(server.call(b"x", "unary_stream"))
    assert server.call(b"x").result() == b"x"


# What is never limited

NEVER = {
    "health": ("grpc.health.v1.Health", "Check", {}),
    "reflection": ("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", {}),
    "heartbeat": ("test.Other", "Any", {"metadata": (("rpcwheel-heartbeat", "1"),)}),
    "without a limit": ("test.Free", "Any", {}),
}


@pytest.mark.parametrize("name", NEVER)
def test_calls_that_are_never_limited_need_no_token_and_run_while_all_threads_are_taken(
    world, limited, name
):
    service, method, options = NEVER[name]
    handlers = grpc.method_handlers_generic_handler(service, {method: echo(world)})
    methods = {"/test.Free/*": MethodPolicy(limit=None)}
    limit = LimitPolicy(max_concurrent=1, max_wait=LONG_S, rate=TWO)
    server = limited(handlers, workers=1, methods=methods, limit=limit)
    server.held(b"hold")
    (waiting,) = server.waiting(b"later")
    for _ in range(3):
        call = server.call(b"x", method=f"/{service}/{method}", **options)
        assert call.result() == b"x"
    assert not waiting.done()
    assert server.status.running == 1
    assert is_above_rate(server.call(b"3"))


@pytest.mark.parametrize(
    ("kind", "cap"), [("unary_unary", "critical"), ("unary_stream", None)], ids=["capped", "stream"]
)
def test_not_every_call_can_be_a_heartbeat(limited, kind, cap):
    """None for a server that does not trust its callers, and no stream."""
    rate = RatePolicy(rate=0.001, burst=1)
    server = limited(limit=LimitPolicy(rate=rate, max_criticality=cap))
    server.call(b"x").result()
    call = server.call(b"x", kind, metadata=(("rpcwheel-heartbeat", "1"),))
    assert is_above_rate(call)


# Rates


def is_above_rate(call, nonce="") -> bool:
    """Whether a call was refused by the rate `TWO`."""
    code, metadata = call.error().code(), call.trailing_metadata()
    assert code is Code.RESOURCE_EXHAUSTED
    assert call.details() == (
        "refused before its handler ran: too many calls have arrived per second"
    )
    assert metadata["rpcwheel-refused"] == nonce
    # When there is a token again, and what every refusal asks for: half to one and a half second.
    return 1_000_500 - WAIT_S * 1000 <= int(metadata["grpc-retry-pushback-ms"]) <= 1_001_500


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
def test_a_call_above_the_rate_of_the_server_is_refused_at_once(limited, kind):
    server = limited(limit=LimitPolicy(max_concurrent=9, max_wait=LONG_S, rate=TWO))
    server.call(b"1").result()
    server.call(b"2", kind).result()
    assert is_above_rate(server.call(b"3", kind, nonce="7"), "7")
    assert is_above_rate(server.call(b"4", criticality="critical_plus"))
    assert server.refused == {("critical_plus", "rate"): 1, ("critical", "rate"): 1}
    assert wait_until(server.is_idle)
    assert server.began == [b"1", b"2"]


def test_the_rate_of_a_method_limits_neither_its_handlers_nor_other_methods(limited):
    server = limited(methods={OTHER: MethodPolicy(limit=LimitPolicy(rate=TWO))})
    for request in (b"hold 1", b"hold 2"):
        server.call(request, method=OTHER)
        server.wait_for(request)
    assert is_above_rate(server.call(b"3", method=OTHER))
    assert server.call(b"x").result() == b"x"
    assert server.refused == {("critical", "rate"): 1}


def test_a_method_with_a_rate_also_has_the_limit_of_the_server(limited):
    server = limited(methods={OTHER: MethodPolicy(limit=LimitPolicy(rate=9))}, **PATIENT)
    server.held(b"hold")
    (waiting,) = server.waiting(b"later", method=OTHER)
    server.release(b"hold")
    assert waiting.result() == b"later"


def test_the_limit_of_a_method_applies_in_addition(world, limited):
    server = limited(
        limit=LimitPolicy(max_concurrent=2, max_wait=LONG_S),
        methods={OTHER: MethodPolicy(limit=1)},
    )
    held = server.call(b"hold other", method=OTHER)
    server.wait_for(b"hold other")
    (waiting,) = server.waiting(b"other", method=OTHER)
    # It does not wait for a call of another method that can't run.
    assert server.call(b"x").result() == b"x"
    server.held(b"hold")
    (last,) = server.waiting(b"last")
    server.release(b"hold other")
    for call in (held, waiting, last):
        call.result()
    assert server.began.index(b"other") < server.began.index(b"last")


def test_other_methods_have_no_limit_if_only_one_has(limited):
    server = limited(methods={OTHER: MethodPolicy(limit=1)}, workers=3)
    server.call(b"hold other", method=OTHER)
    server.wait_for(b"hold other")
    waiting = server.call(b"other", method=OTHER)
    assert wait_until(lambda: server.status.waiting == 1)
    server.held(b"hold 1", b"hold 2")
    assert server.status.running == 1
    assert is_refused(waiting)


# The server's end


def test_calls_that_wait_when_a_server_is_stopped_end_without_their_handlers(world, limited):
    server = limited(**PATIENT)
    (held,) = server.held(b"hold")
    calls = server.waiting(b"1", b"2")
    world.do(server.server.stop, None)
    for call in (held, *calls):
        with contextlib.suppress(world.canceled_error):
            assert call.error().code() in (Code.UNAVAILABLE, Code.CANCELLED)
    server.release(b"hold")
    assert wait_until(server.is_idle)
    assert server.began == [b"hold"]


def test_calls_that_wait_run_while_a_server_is_stopped_gracefully(world, limited):
    server = limited(**PATIENT)
    (held,) = server.held(b"hold")
    (waiting,) = server.waiting(b"later")
    stopping = in_thread(world.do, server.server.stop, WAIT_S)  # `grpc.aio` returns at the end
    assert wait_until(lambda: is_refusing(world, server.target))
    server.release(b"hold")
    assert held.result() == b"hold"
    assert waiting.result() == b"later"
    stopping.result(WAIT_S)
    assert wait_until(server.is_idle)


# Events


def test_an_overload_is_reported_when_it_begins_and_when_it_has_ended(limited, events, set_limit):
    began, ended = OverloadBegan, OverloadEnded

    def of_shop(kind):  # an overload of an earlier test may end now
        return [event for event in events.of(kind) if event.server == "shop"]

    set_limit("limit.refusals.QUIET_NS", 50_000_000)
    server = limited(limit=LimitPolicy(name="shop", max_concurrent=1, max_wait=0.001))
    server.held(b"hold")
    for number in (3, 6):
        calls = [server.call(b"x") for _ in range(3)]
        assert all(map(is_refused, calls))
        wait_until(lambda number=number: number == sum(each.refused for each in of_shop(ended)))
    assert wait_until(lambda: len(of_shop(began)) == len(of_shop(ended)) >= 2)
    assert {event.running for event in of_shop(began)} == {1}


# What handlers see, and other interceptors


def test_a_handler_that_has_waited_has_the_deadline_and_the_criticality_of_its_call(limited):
    def observe():
        deadline = current_deadline()
        return deadline and deadline.remaining(), current_criticality()

    server = limited(observe=observe, **PATIENT)
    server.held(b"hold")
    (first,) = server.waiting(b"1", criticality="sheddable", timeout=WAIT_S)
    (second,) = server.waiting(b"2", timeout=None)
    server.release(b"hold")
    first.result(), second.result()
    plain, limited_by_caller = server.observed[1:]
    assert plain == (None, None)
    assert limited_by_caller[1] is Criticality.SHEDDABLE
    assert 0 < limited_by_caller[0] <= WAIT_S + 1


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("foreign", [foreign_grpc_interceptor, foreign_opentelemetry])
def test_interceptors_of_others_see_the_calls_that_run(world, limited, foreign, place):
    theirs = foreign.Theirs()
    server = limited(**IMPATIENT, **{place: (theirs.server_interceptor(world.name),)})
    (held,) = server.held(b"hold")
    assert is_refused(server.call(b"late"))
    server.release(b"hold")
    held.result()
    assert server.call(b"x", "unary_stream").result() == [b"x"]
    assert wait_until(server.is_idle)
    assert wait_until(lambda: theirs.seen.count("OK") == 2)


def test_a_limit_works_beside_the_detection_of_idle_connections(world, limited):
    server = limited(idle=180.0, **IMPATIENT)
    world.do(server.kit.detect_idle, server.server)
    server.held(b"hold")
    assert is_refused(server.call(b"late"))
    server.release(b"hold")
    assert wait_until(server.is_idle)
    assert server.call(b"x").result() == b"x"


def test_refused_calls_do_not_count_for_the_limit_of_grpc(world, limited):
    server = limited(server={"maximum_concurrent_rpcs": 2}, **IMPATIENT)
    server.held(b"hold")
    for _ in range(4):
        call = server.call(b"late")
        assert call.error().code() is Code.RESOURCE_EXHAUSTED
        assert wait_until(lambda: server.status.waiting == 0)
    server.release(b"hold")
    assert wait_until(server.is_idle)
    assert server.call(b"x").result() == b"x"


# Stress


def test_an_adaptive_limit_counts_nothing_after_calls_that_end_at_random(world, limited):
    server = limited(workers=12, limit="adaptive")
    chance = random.Random(11)
    for _ in range(10):
        calls = []
        for number in range(40):
            kind = chance.choice(["unary_unary", "unary_unary", "unary_stream", "stream_unary"])
            request = chance.choice([b"x", b"hold %d" % number, b"raise", b"abort", b"bad"])
            timeout = chance.choice([0.002, 0.02, 0.2, 10.0])
            level = chance.choice(["", "sheddable", "critical_plus"])
            calls.append(server.call(request, kind, timeout=timeout, criticality=level))
        for call in chance.sample(calls, 20):
            call.cancel()
        server.release(*(b"hold %d" % number for number in range(40)))
        for call in calls:
            with contextlib.suppress(grpc.RpcError, world.canceled_error):
                call.result()
    assert wait_until(server.is_idle)
    assert server.call(b"next").result() == b"next"
