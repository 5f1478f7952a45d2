"""`FlakyServer`."""

import time
from datetime import timedelta

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fixtures.grpc_servers import unary_service
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.testing import FlakyServer

GET = "/shop.Orders/Get"
PAY = "/shop.Orders/Pay"


def code_of(call, *arguments) -> str:
    """The status of a call."""
    try:
        call(b"1", *arguments)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


# Handlers


def test_a_method_without_a_handler_returns_its_request_messages(channel, flaky_server):
    messages = [b"1", b"2"]
    assert channel.unary_unary(GET)(b"1") == b"1"
    assert list(channel.unary_stream(GET)(b"1")) == [b"1"]
    assert list(channel.stream_stream(GET)(iter(messages))) == messages
    assert [call.requests for call in flaky_server.calls] == [[b"1"], [b"1"], messages]


def test_a_service_of_grpc_is_unimplemented_without_a_handler(channel):
    assert code_of(channel.unary_unary("/grpc.health.v1.Health/Check")) == "UNIMPLEMENTED"


@pytest.fixture
def of_every_kind(channel, flaky_server):
    """Calls of handlers of every kind."""

    def joined(request, context):
        return b"".join(request)

    def each(request, context):
        yield from (bytes([byte]) for byte in request)

    methods = {
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(lambda request, context: request[::-1]),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(each),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(joined),
        "StreamStream": grpc.stream_stream_rpc_method_handler(lambda requests, context: requests),
    }
    flaky_server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("shop.Orders", methods)]
    )
    return {
        "UnaryUnary": lambda: channel.unary_unary("/shop.Orders/UnaryUnary")(b"12"),
        "UnaryStream": lambda: list(channel.unary_stream("/shop.Orders/UnaryStream")(b"12")),
        "StreamUnary": lambda: channel.stream_unary("/shop.Orders/StreamUnary")(iter([b"1", b"2"])),
        "StreamStream": lambda: list(
            channel.stream_stream("/shop.Orders/StreamStream")(iter([b"1", b"2"]))
        ),
    }


def test_handlers_of_every_kind_are_served_and_fail_on_command(of_every_kind, flaky_server):
    calls = of_every_kind
    results = [b"21", [b"1", b"2"], b"12", [b"1", b"2"]]
    assert [call() for call in calls.values()] == results
    assert [call.requests for call in flaky_server.calls] == [[b"12"]] * 2 + [[b"1", b"2"]] * 2
    for call in calls.values():
        flaky_server.fail(times=1, code="ABORTED")
        with pytest.raises(grpc.RpcError, match="ABORTED"):
            call()


def test_the_response_of_a_handler_of_any_kind_is_lost_on_command(of_every_kind, flaky_server):
    for call in of_every_kind.values():
        flaky_server.lose_response(times=1)
        with pytest.raises(grpc.RpcError, match="the test lost the response") as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        call()
    *others, first, _ = [call.requests for call in flaky_server.calls]
    assert others == [[b"12"]] * 4 + [[b"1", b"2"]] * 2
    assert first == [b"1"]  # until the first response message


def test_generated_code_registers_a_servicer(channel, flaky_server):
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, flaky_server)
    stub = health_pb2_grpc.HealthStub(channel)
    assert stub.Check(health_pb2.HealthCheckRequest()).status == 1
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == 1
    servicer.set("", 2)
    assert next(watch).status == 2
    watch.cancel()
    flaky_server.lose_response(times=1)
    with pytest.raises(grpc.RpcError, match="the test lost the response"):
        next(stub.Watch(health_pb2.HealthCheckRequest()))


def test_a_call_is_recorded_with_its_metadata_and_deadline(channel, flaky_server):
    began = time.monotonic()
    channel.unary_unary(GET)(b"1", metadata=[("color", "red")], timeout=WAIT_S)
    channel.unary_unary(PAY)(b"2")
    get, pay = flaky_server.calls
    assert (get.method, pay.method) == (GET, PAY)
    assert ("color", "red") in get.metadata
    assert began <= get.time <= pay.time <= time.monotonic()
    assert 0 < get.time_remaining < 2 * WAIT_S
    assert pay.time_remaining is None


# Failures


def test_failures_apply_to_the_next_calls_in_order_and_then_to_all(channel, flaky_server):
    flaky_server.fail()
    flaky_server.fail(code=grpc.StatusCode.INTERNAL)
    flaky_server.fail(times=2, code="ABORTED")
    flaky_server.fail(times=1, code="NOT_FOUND")
    get = channel.unary_unary(GET)
    codes = [code_of(get) for _ in range(5)]
    assert codes == ["ABORTED", "ABORTED", "NOT_FOUND", "INTERNAL", "INTERNAL"]
    flaky_server.recover()
    assert code_of(get) == "OK"
    assert [call.requests for call in flaky_server.calls] == [[b"1"]] * 6


def test_a_failure_has_the_given_method_details_and_trailing_metadata(channel, flaky_server):
    asked = [("grpc-retry-pushback-ms", "5")]
    flaky_server.fail(times=1, method=PAY, details="no stock", trailing_metadata=asked)
    assert code_of(channel.unary_unary(GET)) == "OK"
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(PAY)(b"1")
    assert caught.value.details() == "no stock"
    assert asked[0] in caught.value.trailing_metadata()


def test_a_failure_applies_to_all_methods_of_a_pattern(channel, flaky_server):
    flaky_server.fail(method="/shop.Orders/G*")
    codes = [code_of(channel.unary_unary(method)) for method in (GET, PAY)]
    assert codes == ["UNAVAILABLE", "OK"]


def test_a_frozen_call_continues_after_recovery(channel, flaky_server):
    flaky_server.freeze(times=1)
    call = channel.unary_unary(GET).future(b"1")
    wait_until(lambda: flaky_server.calls)
    assert code_of(channel.unary_unary(GET)) == "OK"  # one call only is frozen
    assert not call.done()
    flaky_server.recover()
    assert call.result(WAIT_S) == b"1"


def test_a_frozen_call_ends_at_its_deadline_without_an_error_log(channel, flaky_server, caplog):
    flaky_server.freeze()
    assert code_of(channel.unary_unary(GET), 0.1) == "DEADLINE_EXCEEDED"
    wait_until(lambda: not flaky_server._frozen)
    assert caplog.records == []


def test_a_lost_response_is_that_of_a_call_that_was_executed(channel, flaky_server):
    executed = []
    pay = unary_service(PAY, lambda request, _: executed.append(request))
    flaky_server.add_generic_rpc_handlers([pay])
    flaky_server.lose_response(method=PAY)
    assert code_of(channel.unary_unary(PAY)) == "UNAVAILABLE"
    assert executed == [b"1"]
    assert code_of(channel.unary_unary(GET)) == "OK"
    flaky_server.lose_response()
    assert code_of(channel.unary_unary(GET)) == "UNAVAILABLE"  # without a handler


def test_a_delayed_call_is_answered_after_the_delay_or_recovery(channel, flaky_server):
    get = channel.unary_unary(GET)
    flaky_server.delay(0.05, times=1)
    began = time.monotonic()
    assert get(b"1") == b"1"
    assert time.monotonic() - began >= 0.05
    flaky_server.delay(timedelta(hours=1))
    assert code_of(get, 0.1) == "DEADLINE_EXCEEDED"
    call = get.future(b"1")
    wait_until(lambda: len(flaky_server.calls) == 3)
    flaky_server.recover()
    assert call.result(WAIT_S) == b"1"


def test_a_stopped_server_refuses_connections_until_it_starts_on_its_port(channel, flaky_server):
    get, target = channel.unary_unary(GET), flaky_server.target
    flaky_server.freeze(times=1)
    frozen = get.future(b"1")
    wait_until(lambda: flaky_server.calls)
    for _ in range(2):
        flaky_server.stop()
    assert frozen.code().name == "UNAVAILABLE"
    assert code_of(get) == "UNAVAILABLE"
    for _ in range(2):
        flaky_server.start()
    assert get(b"1", wait_for_ready=True, timeout=WAIT_S) == b"1"
    assert flaky_server.target == target


def test_two_servers_have_different_ports(flaky_server):
    with FlakyServer() as other:
        assert other.port != flaky_server.port


def test_invalid_arguments_are_refused(flaky_server):
    for arguments in [{"times": 0}, {"code": "OK"}, {"code": 14}]:
        with pytest.raises(ConfigurationError, match=f"^{next(iter(arguments))} must be"):
            flaky_server.fail(**arguments)
    for method in ("Get", "/shop.Orders/", ""):
        with pytest.raises(ConfigurationError, match=r"^method: .* names no methods"):
            flaky_server.fail(method=method)
    with pytest.raises(ConfigurationError):
        flaky_server.freeze(times=-1)
    with pytest.raises(ConfigurationError, match="seconds must"):
        flaky_server.delay(-1.0)
    for metadata in [[("Upper", "x")], [("a", 1)], [("a",)], 5]:
        with pytest.raises(ConfigurationError, match=r"^trailing_metadata: "):
            flaky_server.fail(trailing_metadata=metadata)
    with pytest.raises(TypeError, match=r"^times must be a whole number or None, not 1\.5"):
        flaky_server.fail(1.5)
