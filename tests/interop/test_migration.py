"""The code of docs/migration, before and after, against a gRPC server."""

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from grpc_interceptor.exceptions import NotFound
from prometheus_client import CollectorRegistry

from fixtures.programs import python
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.testing import FlakyServer

pytest.importorskip("google.cloud.tasks_v2", reason="the client in google-api-core.md")
stamina = pytest.importorskip("stamina")
PromClientInterceptor = pytest.importorskip(
    "py_grpc_prometheus.prometheus_client_interceptor"
).PromClientInterceptor

PAGES = Path(__file__).parents[2].joinpath("docs", "migration")
ADDRESS = "127.0.0.1:50051"
GET = "/shop.Orders/Get"


def code(page: str, heading: str) -> str:
    """The Python code under a heading of a page."""
    text = PAGES.joinpath(f"{page}.md").read_text()
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
    block = re.search(r"^( *)```python\n(.*?)^ *```$", section, re.MULTILINE | re.DOTALL)[2]
    return dedent(block)


class Program:
    """The names that the code of a page has defined."""

    def __init__(self, page: str, heading: str, target: str) -> None:
        self.names: dict = {"__name__": "__main__"}
        source = code(page, heading).replace(ADDRESS, target)
        # Those of the pages are too short for a machine under load
        source = re.sub(
            r"(timeout(?: or |=))([\d.]+)",
            lambda found: f"{found[1]}{30 * float(found[2])}",
            source,
        )
        exec(compile(source, f"{page}.md: {heading}", "exec"), self.names)

    def __getattr__(self, name: str):
        return self.names[name]

    def close(self) -> None:
        for name in ("channel", "below", "kit"):
            if name in self.names:
                self.names[name].close()


@pytest.fixture
def run(flaky_server) -> Iterator:
    """Runs the code under a heading of a page, whose channel is one to the server."""
    with contextlib.ExitStack() as programs:

        def run(page: str, heading: str) -> Program:
            program = Program(page, heading, flaky_server.target)
            programs.callback(program.close)
            return program

        yield run


@pytest.fixture(autouse=True)
def no_metrics_of_stamina() -> Iterator[None]:
    """Its counter would stay in the registry of the process."""
    stamina.instrumentation.set_on_retry_hooks([])
    yield
    stamina.instrumentation.set_on_retry_hooks(None)


def attempts(server: FlakyServer) -> int:
    """How many calls the server has got since the last question."""
    count = len(server.calls)
    server.calls.clear()
    return count


# Retries

SYNC = [
    *((page, where) for page in ("tenacity", "stamina") for where in ("Before", "After")),
    ("google-api-core", "Before"),
    ("google-api-core", "After"),
    ("grpc-interceptor", "A client: before"),
    ("grpc-interceptor", "A client: after"),
]

TOGETHER = [
    *((page, "Step by step") for page in ("tenacity", "stamina", "google-api-core")),
    ("grpc-interceptor", "Both together"),
]

each_program = pytest.mark.parametrize(("page", "heading"), [*SYNC, *TOGETHER])


@each_program
def test_a_call_succeeds_at_its_third_attempt(run, flaky_server, no_waits, page, heading):
    flaky_server.fail(times=2)
    assert run(page, heading).get_order(b"1") == b"1"
    assert attempts(flaky_server) == 3


@each_program
def test_a_call_with_another_status_is_made_once(run, flaky_server, page, heading):
    flaky_server.fail(code="INVALID_ARGUMENT")
    with pytest.raises(Exception, match="the test lets this call fail"):
        run(page, heading).get_order(b"1")
    assert attempts(flaky_server) == 1


@pytest.mark.parametrize(
    ("page", "heading"), [way for way in [*SYNC, *TOGETHER] if way[0] != "google-api-core"]
)
def test_a_call_has_four_attempts(run, flaky_server, no_waits, page, heading):
    flaky_server.fail()
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        run(page, heading).get_order(b"1")
    assert attempts(flaky_server) == 4


@pytest.mark.parametrize("page", ["tenacity", "stamina", "google-api-core"])
def test_an_aio_call_succeeds_at_its_third_attempt(flaky_server, no_waits, page):
    program = Program(page, "With grpc.aio", flaky_server.target)
    flaky_server.fail(times=2)
    assert asyncio.run(program.get_order(b"1")) == b"1"
    assert attempts(flaky_server) == 3


@pytest.mark.parametrize("page", ["tenacity", "stamina"])
def test_attempts_of_two_retries_multiply(run, flaky_server, no_waits, page):
    program = run(page, "After")
    flaky_server.fail()

    @stamina.retry(on=grpc.RpcError, attempts=3, wait_initial=0.001, wait_jitter=0)
    def get_order(number: bytes) -> bytes:
        return program.get_order(number)

    with pytest.raises(grpc.RpcError):
        get_order(b"1")
    assert attempts(flaky_server) == 12


def test_the_kit_keeps_the_exceptions_of_google_and_its_budget_ends_the_attempts(
    run, flaky_server, no_waits
):
    from google.api_core import exceptions

    flaky_server.fail()
    with pytest.raises(exceptions.ServiceUnavailable):
        run("google-api-core", "Step by step").get_order(b"1")
    assert attempts(flaky_server) == 11


def test_a_client_of_google_cloud_is_retried_by_the_kit(flaky_server, no_waits):
    from google.cloud import tasks_v2
    from google.cloud.tasks_v2.services.cloud_tasks.transports import CloudTasksGrpcTransport

    import rpcwheel

    handler = grpc.unary_unary_rpc_method_handler(
        lambda request, context: tasks_v2.Queue(name=request.name),
        tasks_v2.GetQueueRequest.deserialize,
        tasks_v2.Queue.serialize,
    )
    flaky_server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "google.cloud.tasks.v2.CloudTasks", {"GetQueue": handler}
            )
        ]
    )
    flaky_server.fail(times=2)
    retry = rpcwheel.RetryPolicy(retry_on="UNAVAILABLE")
    kit = rpcwheel.Kit(retry=retry, idempotent=True)
    with kit.intercept_channel(grpc.insecure_channel(flaky_server.target)) as channel, kit:
        client = tasks_v2.CloudTasksClient(transport=CloudTasksGrpcTransport(channel=channel))
        name = "projects/shop/locations/here/queues/orders"
        assert client.get_queue(name=name, retry=None).name == name
    assert attempts(flaky_server) == 3


def test_interceptors_below_the_kit_run_for_each_attempt_and_above_it_for_each_call(
    run, flaky_server, no_waits
):
    program = run("grpc-interceptor", "Both together")
    flaky_server.fail(times=2)
    program.get_order(b"1")
    assert program.seen == ["call", "attempt", "attempt", "attempt"]


# The background


def test_the_policy_in_place_of_a_celery_task_delivers_a_call_later(
    run, flaky_server, no_waits, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # the journal of the page is a file in the current directory
    flaky_server.fail(times=2)
    program = run("celery", "After")
    assert program.push(b"order 1") == b""
    wait_until(lambda: len(flaky_server.calls) == 3)


def test_tenacity_objects_set_the_background_attempts_of_a_function(run, capsys):
    program = run("tenacity", "Retries in the background")
    assert capsys.readouterr().out == "1\n['order 1', 'order 1']\n"
    assert program.send.failback.stats().redelivered == 1


def test_failback_after_dubbo_returns_at_once_and_delivers_later(run, flaky_server, no_waits):
    flaky_server.fail(times=3)
    program = run("dubbo", "Failback: after")
    assert program.push(b"line") == b""
    wait_until(lambda: program.kit.pending == 0)
    assert attempts(flaky_server) == 4
    (stats,) = program.kit.stats().values()
    assert (stats.redelivered, stats.gave_up) == (1, 0)


def test_failback_after_dubbo_gives_up_after_four_attempts(run, flaky_server, no_waits):
    flaky_server.fail()
    program = run("dubbo", "Failback: after")
    program.push(b"line")
    wait_until(lambda: program.kit.pending == 0)
    assert attempts(flaky_server) == 4


@pytest.mark.parametrize(
    ("method", "made", "response"),
    [
        pytest.param("/shop.Orders/Get", 3, None, id="failover"),
        pytest.param("/shop.Orders/Put", 1, None, id="failfast"),
        pytest.param("/shop.Views/Count", 1, b"", id="failsafe"),
        pytest.param("/shop.Stock/Get", 2, None, id="forking"),
    ],
)
def test_a_cluster_mode_of_dubbo_makes_as_many_attempts(
    run, flaky_server, no_waits, method, made, response
):
    flaky_server.fail()
    call = run("dubbo", "The other modes").channel.unary_unary(method)
    if response is None:
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            call(b"1")
    else:
        assert call(b"1") == response
    wait_until(lambda: len(flaky_server.calls) == made)


# Servers


class Handlers:
    """One method, whose calls stay in their handler until they may leave."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.leave = threading.Event()

    def get(self, request: BytesValue, context: grpc.ServicerContext) -> BytesValue:
        if request.value == b"unknown":
            raise NotFound("no such order")
        self.entered.release()
        self.leave.wait(WAIT_S)
        return request

    def add_to(self, server: grpc.Server) -> str:
        # grpc-interceptor takes a response of plain bytes for a stream
        get = grpc.unary_unary_rpc_method_handler(
            self.get, BytesValue.FromString, BytesValue.SerializeToString
        )
        handlers = {"Get": get}
        generic = grpc.method_handlers_generic_handler("shop.Orders", handlers)
        server.add_generic_rpc_handlers((generic,))
        return f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"


@pytest.mark.parametrize("heading", ["A server: before", "A server: after"])
def test_the_ninth_call_is_refused_and_exceptions_have_their_status(run, heading):
    program, handlers = run("grpc-interceptor", heading), Handlers()
    target = handlers.add_to(program.server)
    program.server.start()
    try:
        with grpc.insecure_channel(target) as channel:
            get = channel.unary_unary(GET, BytesValue.SerializeToString, BytesValue.FromString)
            with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
                get(BytesValue(value=b"unknown"), timeout=WAIT_S)
            orders = [BytesValue(value=b"%d" % number) for number in range(9)]
            running = [get.future(order, timeout=WAIT_S) for order in orders[:8]]
            for _ in running:
                assert handlers.entered.acquire(timeout=WAIT_S)
            with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
                get(orders[8], timeout=WAIT_S)
            handlers.leave.set()
            assert [call.result() for call in running] == orders[:8]
    finally:
        handlers.leave.set()
        program.server.stop(None).wait()


# Metrics, each in a process: they are in the registry of the process

USE = """
handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
generic = grpc.method_handlers_generic_handler("shop.Orders", {"Get": handler})
server.add_generic_rpc_handlers((generic,))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as plain:
    plain.unary_unary("/shop.Orders/Get")(b"1")
server.stop(None).wait()
"""

SHOW = """
import urllib.request

channel.unary_unary("/shop.Orders/Get")(b"1")
for shown in [page, *([old_page] if "old_page" in globals() else [])]:
    url = f"http://127.0.0.1:{shown.server_port}/metrics"
    print(urllib.request.urlopen(url).read().decode())
    print("---")
channel.close()
"""


def metrics(source: str, target: str) -> list[dict[str, float]]:
    """The metrics of a program that makes one call, on each of its pages."""
    program = source.replace(ADDRESS, target) + SHOW
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    pages = done.stdout.split("---\n")[:-1]
    return [
        {
            name: float(value)
            for name, value in (
                line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("grpc_")
            )
            if not re.search(r"_(bucket|created|sum)\b", name)
        }
        for page in pages
    ]


def lowered(metrics: dict[str, float]) -> dict[str, float]:
    return {name.replace('"UNARY"', '"unary"'): value for name, value in metrics.items()}


def test_the_metrics_of_unary_calls_have_the_same_names_and_labels(flaky_server):
    (before,) = metrics(code("py-grpc-prometheus", "Before") + USE, flaky_server.target)
    (after,) = metrics(code("py-grpc-prometheus", "After") + USE, flaky_server.target)
    assert len(before) == 6
    assert lowered(before).items() <= after.items()
    more = {name.partition("{")[0] for name in after.keys() - lowered(before).keys()}
    assert more == {
        "grpc_client_attempt_started_total",
        "grpc_client_attempt_duration_seconds_count",
    }


def test_with_two_registries_both_have_the_metrics(flaky_server):
    ours, old = metrics(code("py-grpc-prometheus", "Both together"), flaky_server.target)
    assert lowered(old).items() <= ours.items()
    assert len(old) == 2


def test_in_one_registry_the_metrics_of_the_older_library_are_shown(flaky_server):
    together = code("py-grpc-prometheus", "Both together")
    shared = together.replace(
        "old = CollectorRegistry()", "from prometheus_client import REGISTRY as old"
    )
    ours, _ = metrics(shared, flaky_server.target)
    assert 'grpc_type="UNARY"' in next(name for name in ours if "client_started" in name)
    assert any(name.startswith("grpc_client_attempt_started_total") for name in ours)


# What behaves differently, by the tables of the pages


@pytest.fixture
def counted(flaky_server) -> Iterator[tuple[grpc.Channel, CollectorRegistry]]:
    """A channel with the client interceptor of py-grpc-prometheus, and its registry."""
    registry = CollectorRegistry()
    with grpc.insecure_channel(flaky_server.target) as channel:
        yield grpc.intercept_channel(channel, PromClientInterceptor(registry=registry)), registry


def total(registry: CollectorRegistry, name: str, kind: str) -> float:
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and sample.labels["grpc_type"] == kind
    )


def test_py_grpc_prometheus_counts_no_end_of_a_stream(counted):
    channel, registry = counted
    list(channel.unary_stream("/shop.Orders/List")(b"1", timeout=WAIT_S))
    channel.stream_unary("/shop.Orders/Upload")(iter([b"1"]), timeout=WAIT_S)
    list(channel.stream_stream("/shop.Orders/Talk")(iter([b"1"]), timeout=WAIT_S))
    kinds = ("SERVER_STREAMING", "CLIENT_STREAMING", "BIDI_STREAMING")
    assert [total(registry, "grpc_client_handled_total", kind) for kind in kinds] == [0, 0, 0]
    assert [total(registry, "grpc_client_started_total", kind) for kind in kinds] == [1, 1, 0]


def test_a_second_interceptor_of_py_grpc_prometheus_needs_another_registry(counted):
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        PromClientInterceptor(registry=counted[1])


def test_a_response_stream_behind_py_grpc_prometheus_has_no_status(counted):
    stream = counted[0].unary_stream("/shop.Orders/List")(b"1", timeout=WAIT_S)
    assert not hasattr(stream, "code")
    list(stream)


@pytest.mark.parametrize("library", ["py-grpc-prometheus", "grpc-interceptor"])
def test_an_interceptor_that_asks_for_the_status_waits_for_the_end_of_a_future(
    run, flaky_server, counted, library
):
    pages = {"py-grpc-prometheus": counted[0]}
    channel = pages.get(library) or run(library, "A client: before").channel
    flaky_server.freeze()
    call = channel.unary_unary(GET).future(b"1", timeout=0.2)
    assert call.done()
    flaky_server.recover()


def test_a_response_stream_never_ends_for_an_interceptor_that_asks_for_its_status(run):
    channel = run("grpc-interceptor", "A client: before").channel
    with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
        list(channel.unary_stream("/shop.Orders/List")(b"1", timeout=0.2))


def test_a_retry_in_an_interceptor_sends_the_rest_of_a_request_stream(run, flaky_server):
    channel = run("grpc-interceptor", "A client: before").channel
    flaky_server.fail(times=1)
    channel.stream_unary("/shop.Orders/Upload")(iter([b"1", b"2"]))
    first, second = (call.requests for call in flaky_server.calls)
    assert second != [b"1", b"2"]
    assert first


def test_failback_after_dubbo_raises_a_status_that_retry_on_does_not_name(run, flaky_server):
    flaky_server.fail(code="INVALID_ARGUMENT")
    with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
        run("dubbo", "Failback: after").push(b"line")
