"""The statements of docs/comparison.md about other libraries, those with a check mark.

If a test fails, the library has changed: correct the page, and its versions.
"""

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import grpc
import pytest
import tenacity

from fixtures.grpc_servers import unary_service
from fixtures.waiting import WAIT_S
from rpcwheel.testing import FlakyServer

stamina = pytest.importorskip("stamina")
redress = pytest.importorskip("redress")
google_retry = pytest.importorskip("google.api_core.retry")

GET = "/shop.Orders/Get"


@pytest.fixture
def channel(flaky_server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(flaky_server.target) as channel:
        yield channel


@pytest.fixture(autouse=True)
def no_metrics_of_stamina() -> Iterator[None]:
    """Its counter would stay in the registry of the process."""
    stamina.instrumentation.set_on_retry_hooks([])
    yield
    stamina.instrumentation.set_on_retry_hooks(None)


def requests(server: FlakyServer) -> list[list[bytes]]:
    return [call.requests for call in server.calls]


def serve_a_list_that_fails_once(server: FlakyServer) -> str:
    """A response stream of three messages, which ends after two at the first call."""
    failed = threading.Event()

    def listed(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"1"
        yield b"2"
        if not failed.is_set():
            failed.set()
            context.abort(grpc.StatusCode.UNAVAILABLE, "once")
        yield b"3"

    handlers = {"List": grpc.unary_stream_rpc_method_handler(listed)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("shop.Orders", handlers)])
    return "/shop.Orders/List"


FROM_THE_START = [b"1", b"2", b"1", b"2", b"3"]


# gRPC


def attempts_with(policy: dict, server: FlakyServer) -> int:
    config = {"methodConfig": [{"name": [{}], **policy}]}
    options = [("grpc.service_config", json.dumps(config))]
    with (
        grpc.insecure_channel(server.target, options=options) as channel,
        pytest.raises(grpc.RpcError, match="UNAVAILABLE"),
    ):
        channel.unary_unary(GET)(b"1", timeout=WAIT_S)
    return len(server.calls)


def test_grpc_makes_at_most_five_attempts(flaky_server):
    flaky_server.fail()
    policy = {
        "maxAttempts": 10,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    assert attempts_with({"retryPolicy": policy}, flaky_server) == 5


def test_grpc_for_python_does_not_hedge(flaky_server):
    flaky_server.fail()
    policy = {"maxAttempts": 3, "hedgingDelay": "0s", "nonFatalStatusCodes": ["UNAVAILABLE"]}
    assert attempts_with({"hedgingPolicy": policy}, flaky_server) == 1


# tenacity and stamina


def by_tenacity(function):
    return tenacity.retry(stop=tenacity.stop_after_attempt(3), reraise=True)(function)


def by_stamina(function):
    return stamina.retry(on=Exception, attempts=3, wait_initial=0.001, wait_jitter=0)(function)


each_decorator = pytest.mark.parametrize("retry", [by_tenacity, by_stamina])


@each_decorator
def test_a_decorator_sends_the_rest_of_a_request_stream_and_the_call_succeeds(
    flaky_server, channel, retry
):
    flaky_server.fail(times=1)
    upload = retry(channel.stream_unary("/shop.Orders/Upload"))
    upload(iter([b"1", b"2"]), timeout=WAIT_S)
    sent = requests(flaky_server)
    assert len(sent) == 2
    assert sent[1] != [b"1", b"2"]


@each_decorator
def test_a_decorator_does_not_retry_a_future_or_a_response_stream(flaky_server, channel, retry):
    flaky_server.fail()
    future = retry(channel.unary_unary(GET).future)(b"1", timeout=WAIT_S)
    assert future.code() is grpc.StatusCode.UNAVAILABLE
    stream = retry(channel.unary_stream("/shop.Orders/List"))(b"1", timeout=WAIT_S)
    with pytest.raises(grpc.RpcError):
        list(stream)
    assert len(flaky_server.calls) == 2


@each_decorator
def test_a_decorator_waits_on_the_thread_of_the_caller(retry):
    threads = []

    @retry
    def fail() -> None:
        threads.append(threading.get_ident())
        raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()
    assert threads == [threading.get_ident()] * 3


def test_stamina_begins_a_response_stream_from_the_start(flaky_server, channel):
    items = channel.unary_stream(serve_a_list_that_fails_once(flaky_server))

    @by_stamina
    def listed() -> Iterator[bytes]:
        yield from items(b"", timeout=WAIT_S)

    assert list(listed()) == FROM_THE_START


def test_the_timeout_of_stamina_does_not_end_an_attempt():
    timeout = 0.001

    @stamina.retry(on=ConnectionError, timeout=timeout)
    def slow() -> float:
        begun = time.monotonic()
        time.sleep(20 * timeout)
        return time.monotonic() - begun

    assert slow() > timeout


# google-api-core


def test_a_retry_of_google_around_a_plain_stub_retries_nothing(flaky_server, channel):
    flaky_server.fail()
    with pytest.raises(grpc.RpcError):
        google_retry.Retry()(channel.unary_unary(GET))(b"1", timeout=WAIT_S)
    assert len(flaky_server.calls) == 1


def test_google_gives_an_attempt_the_whole_timeout_if_less_than_a_second_is_left():
    from google.api_core.timeout import TimeToDeadlineTimeout

    times = iter([0.0, 0.0, 5.0, 9.5])
    timeouts = []

    @TimeToDeadlineTimeout(10.0, clock=lambda: datetime.fromtimestamp(next(times), tz=UTC))
    def attempt(timeout: float) -> None:
        timeouts.append(timeout)

    for _ in range(3):
        attempt()
    assert timeouts == [10.0, 5.0, 10.0]


def test_a_streaming_retry_of_google_begins_from_the_start(flaky_server, channel):
    from google.api_core import exceptions, grpc_helpers

    items = grpc_helpers.wrap_errors(
        channel.unary_stream(serve_a_list_that_fails_once(flaky_server))
    )
    unavailable = google_retry.if_exception_type(exceptions.ServiceUnavailable)
    retry = google_retry.StreamingRetry(unavailable, initial=0.01)
    assert list(retry(items)(b"", timeout=WAIT_S)) == FROM_THE_START


# redress


@pytest.fixture
def breaker():
    return redress.CircuitBreaker(failure_threshold=2)


@pytest.fixture
def redressed(channel, breaker) -> grpc.Channel:
    """A channel whose interceptor makes three attempts, with a breaker."""
    from redress.contrib.grpc import unary_unary_client_interceptor

    retry = redress.Retry(
        classifier=redress.grpc_classifier, strategy=lambda _: 0.0, max_attempts=3
    )
    policy = redress.Policy(retry=retry, circuit_breaker=breaker)
    return grpc.intercept_channel(channel, unary_unary_client_interceptor(policy))


def test_redress_does_not_see_streams(flaky_server, redressed):
    flaky_server.fail()
    with pytest.raises(grpc.RpcError):
        list(redressed.unary_stream("/shop.Orders/List")(b"1", timeout=WAIT_S))
    with pytest.raises(grpc.RpcError):
        redressed.stream_unary("/shop.Orders/Upload")(iter([b"1"]), timeout=WAIT_S)
    assert len(flaky_server.calls) == 2


def test_redress_does_not_retry_a_future_that_fails_after_it_was_returned(flaky_server, redressed):
    returned = threading.Event()

    def get(request: bytes, context: grpc.ServicerContext) -> None:
        returned.wait(WAIT_S)
        context.abort(grpc.StatusCode.UNAVAILABLE, "late")

    flaky_server.add_generic_rpc_handlers([unary_service(GET, get)])
    future = redressed.unary_unary(GET).future(b"1", timeout=WAIT_S)
    returned.set()
    assert future.code() is grpc.StatusCode.UNAVAILABLE
    assert len(flaky_server.calls) == 1


def test_redress_retries_after_a_deadline(flaky_server, redressed):
    flaky_server.fail(code="DEADLINE_EXCEEDED")
    with pytest.raises(grpc.RpcError):
        redressed.unary_unary(GET)(b"1", timeout=WAIT_S)
    assert len(flaky_server.calls) == 3


def test_the_breaker_of_redress_counts_calls_and_raises_no_rpc_error(
    flaky_server, redressed, breaker
):
    flaky_server.fail()
    get = redressed.unary_unary(GET)
    for _ in range(2):
        assert breaker.state is redress.CircuitState.CLOSED
        with pytest.raises(grpc.RpcError):
            get(b"1", timeout=WAIT_S)
    with pytest.raises(redress.CircuitOpenError) as error:
        get(b"1", timeout=WAIT_S)
    assert not isinstance(error.value, grpc.RpcError)
    assert len(flaky_server.calls) == 6
