"""One measurement in this process: `python -m benchmarks.capacity.child STEP SCALE NAME`.

STEP is "growth", "disk", "series" or "threads". Prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

import rpcwheel
from benchmarks._child import print_rows
from benchmarks._engines import engine
from benchmarks.capacity.subjects import (
    BARE,
    BODY,
    BREAKERS,
    HEARTBEAT,
    INSTANCES,
    METHODS,
    QUEUED,
    QUEUED_AIO,
    RECONNECTING,
    SCALES,
    SERVER_BARE,
    SERVER_IDLE,
    TIMEOUTS,
    Disk,
    Growth,
    Series,
    Threads,
)
from rpcwheel import FailbackPolicy, MethodPolicy
from rpcwheel.failback.stored import StoredRpc
from rpcwheel.journal import JournalBackend, NewCall, open_journal_backend
from rpcwheel.journal.backend import Delivered, Route
from rpcwheel.registry import ServiceInstance
from rpcwheel.rpc import Kind

NOTHING_LISTENS = "127.0.0.1:9"
GET = "/shop.Orders/Get"
PROCESS = Path("/proc/self")
REST_S = 1.0
"""For threads that start or end later."""

BATCH = 1000
TARGET = "orders:50051"

Make = Callable[[int], object]
"""Makes a number of subjects; they exist as long as the result."""


def growth(subject: str, number: int) -> Growth:
    """What the process occupies more after so many."""
    with ExitStack() as stack:
        make = MAKERS[subject](stack)
        warm_up = make(min(number, 10))
        memory, threads, descriptors = occupied()
        made = make(number)
        after = occupied()
        del warm_up, made
    return Growth(
        subject,
        number,
        (after[0] - memory) / number,
        after[1] - threads,
        (after[2] - descriptors) / number,
    )


def occupied() -> tuple[int, int, int]:
    """Bytes of memory, threads and descriptors of this process."""
    time.sleep(REST_S)
    gc.collect()
    pages = int(PROCESS.joinpath("statm").read_text().split()[1])
    tasks, descriptors = (len(list(PROCESS.joinpath(name).iterdir())) for name in ("task", "fd"))
    return pages * os.sysconf("SC_PAGE_SIZE"), tasks, descriptors


# Growth: the functions prepare, and return what makes a number of subjects.


def policy() -> FailbackPolicy:
    """A policy whose calls wait."""
    return FailbackPolicy(
        retry_on="UNAVAILABLE", default=b"", backoff=3600.0, max_attempts=None, max_pending=1 << 20
    )


def queued(stack: ExitStack) -> Make:
    """Failed calls, queued in memory."""
    kit = rpcwheel.Kit(timeout=5.0, methods={GET: MethodPolicy(failback=policy())})
    stack.callback(kit.close, drain_timeout=0.0)
    call = stack.enter_context(kit.channel(NOTHING_LISTENS)).unary_unary(GET)

    def make(number: int) -> None:
        for each in range(number):
            call(BODY + b"%d" % each)

    return make


def queued_aio(stack: ExitStack) -> Make:
    """The same with `grpc.aio`."""
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)

    async def opened() -> tuple[Any, Any]:
        kit = rpcwheel.aio.Kit(timeout=5.0, methods={GET: MethodPolicy(failback=policy())})
        return kit, kit.channel(NOTHING_LISTENS)

    kit, channel = loop.run_until_complete(opened())
    call = channel.unary_unary(GET)

    async def calls(number: int) -> None:
        for each in range(number):
            await call(BODY + b"%d" % each)

    stack.callback(lambda: loop.run_until_complete(kit.close(drain_timeout=0.0)))
    stack.callback(lambda: loop.run_until_complete(channel.close()))
    return lambda number: loop.run_until_complete(calls(number))


def connections(connect: Callable[[str], grpc.Channel]) -> Callable[[ExitStack], Make]:
    """Channels with a connection each, to a server in another process."""

    def prepare(stack: ExitStack) -> Make:
        target = stack.enter_context(served())

        def make(number: int) -> list[grpc.Channel]:
            channels = [stack.enter_context(connect(target)) for _ in range(number)]
            for channel in channels:
                channel.unary_unary(GET)(b"", timeout=30.0)
            return channels

        return make

    return prepare


def bare_channel(target: str) -> grpc.Channel:
    """A channel of gRPC with a connection of its own."""
    return grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])


def kit_connections(**settings: Any) -> Callable[[ExitStack], Make]:
    """Connections of the channels of one kit, which is made when they are measured."""

    def prepare(stack: ExitStack) -> Make:
        return connections(rpcwheel.Kit(timeout=30.0, **settings).channel)(stack)

    return prepare


@contextmanager
def served() -> Iterator[str]:
    """The address of a server in a forked process, which has not used gRPC before."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        server = grpc.server(ThreadPoolExecutor(4))
        server.add_generic_rpc_handlers([handlers()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        os.write(write, b"%d\n" % port)
        server.wait_for_termination()
    try:
        yield f"127.0.0.1:{int(os.read(read, 100))}"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def handlers() -> grpc.GenericRpcHandler:
    """A service whose method returns its request."""
    echo = grpc.unary_unary_rpc_method_handler(lambda request, _context: request)
    service, method = GET.strip("/").split("/")
    return grpc.method_handlers_generic_handler(service, {method: echo})


def server_connections(**settings: Any) -> Callable[[ExitStack], Make]:
    """Connections of a server in this process, from a client in another one."""

    def prepare(stack: ExitStack) -> Make:
        ask, answer = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            connect_forever(ask[0], answer[1])
        stack.callback(os.waitpid, child, 0)
        stack.callback(os.kill, child, 9)
        kit = stack.enter_context(rpcwheel.Kit(**settings))
        pool = stack.enter_context(ThreadPoolExecutor(4))
        server = grpc.server(pool, interceptors=kit.server_interceptors())
        server.add_generic_rpc_handlers([handlers()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        stack.callback(lambda: server.stop(None).wait())
        if settings:
            stack.enter_context(kit.detect_idle(server, ports=port))

        def make(number: int) -> None:
            os.write(ask[1], b"%d %d\n" % (port, number))
            os.read(answer[0], 1)

        return make

    return prepare


def connect_forever(ask: int, answer: int) -> None:
    """Open as many connections as are asked for, with a call on each."""
    channels = []
    while words := os.read(ask, 100).split():
        port, number = map(int, words)
        for _ in range(number):
            channels.append(bare_channel(f"127.0.0.1:{port}"))
            channels[-1].unary_unary(GET)(b"", timeout=30.0)
        os.write(answer, b"!")


def instances(stack: ExitStack) -> Make:
    """Instances of a service: in the process that publishes them, and in one that follows it."""
    registry = stack.enter_context(rpcwheel.open_registry("memory://capacity"))
    other = stack.enter_context(rpcwheel.open_registry("memory://capacity"))
    subscription = stack.enter_context(other.subscribe("shop.Orders", lambda _: None))
    subscription.wait(30.0)
    published: list[int] = []

    def make(number: int) -> None:
        first = len(published)
        for each in range(first, first + number):
            published.append(each)
            host = f"10.{each >> 16 & 255}.{each >> 8 & 255}.{each & 255}"
            registry.register(ServiceInstance(service="shop.Orders", host=host, port=50051))
        while subscription.snapshot is None or len(subscription.snapshot.instances) < len(
            published
        ):
            time.sleep(0.05)

    return make


def called_methods(**settings: Any) -> Callable[[ExitStack], Make]:
    """Methods that were called."""

    def prepare(stack: ExitStack) -> Make:
        kit = stack.enter_context(rpcwheel.Kit(timeout=5.0, **settings))
        channel = stack.enter_context(kit.channel(NOTHING_LISTENS))
        called: list[int] = []

        def make(number: int) -> None:
            for _ in range(number):
                called.append(len(called))
                with suppress(grpc.RpcError):
                    channel.unary_unary(f"/shop.Orders/Get{len(called)}")(b"")

        return make

    return prepare


def timeouts(stack: ExitStack) -> Make:
    """Timeouts of the default timer."""
    timer = stack.enter_context(rpcwheel.timer.WheelTimer())

    def make(number: int) -> list[object]:
        return [timer.new_timeout(print, 3600.0 + each) for each in range(number)]

    return make


MAKERS: dict[str, Callable[[ExitStack], Make]] = {
    QUEUED: queued,
    QUEUED_AIO: queued_aio,
    BARE: connections(bare_channel),
    RECONNECTING: kit_connections(),
    HEARTBEAT: kit_connections(heartbeat=60.0),
    SERVER_BARE: server_connections(),
    SERVER_IDLE: server_connections(idle=3600.0),
    INSTANCES: instances,
    BREAKERS: called_methods(breaker=0.5, throttle=2.0),
    METHODS: called_methods(),
    TIMEOUTS: timeouts,
}


# Disk


def disk(name: str, number: int) -> Disk:
    """The size of an engine's data for so many calls, and after their delivery."""
    with ENGINES[name]() as (url, size):
        journal = open_journal_backend(url)
        journal.depths()  # opens it, and makes its tables
        empty = size()
        store(journal, number)
        stored = size()
        deliver(journal)
        delivered = size()
        journal.close()
    return Disk(name, number, (stored - empty) / number, (delivered - empty) / number)


def store(journal: JournalBackend, number: int) -> None:
    """Store calls that are due, with a body as that of a unary call."""
    body = StoredRpc(Kind.UNARY_UNARY, (BODY,)).encoded()
    for first in range(0, number, BATCH):
        journal.append(
            [
                NewCall("audit", TARGET, GET, f"{each:032x}", body, 0.0, 86_400.0)
                for each in range(first, min(number, first + BATCH))
            ]
        )


def deliver(journal: JournalBackend) -> None:
    """Take all calls, and report their success."""
    while taken := journal.take("worker", 15.0, [Route("audit", TARGET, BATCH)], 0.0):
        journal.report("worker", [Delivered(call.id) for call in taken])


Measured = Iterator[tuple[str, Callable[[], int]]]


@contextmanager
def sqlite() -> Measured:
    """A file."""
    with tempfile.TemporaryDirectory() as directory:
        parts = [Path(directory, f"failback.db{end}") for end in ("", "-wal", "-shm")]
        yield (
            f"sqlite://{directory}/failback.db",
            lambda: sum(part.stat().st_size for part in parts if part.exists()),
        )


@contextmanager
def postgresql() -> Measured:
    """The tables of the journal with their indexes, without the write-ahead log."""
    import psycopg

    with engine("postgresql")() as server:
        url = server.journal_url()

        def size() -> int:
            with psycopg.connect(url, autocommit=True) as connection:
                row = connection.execute(
                    "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class "
                    "WHERE relkind = 'r' AND relnamespace = 'rpcwheel'::regnamespace"
                ).fetchone()
            return int(row[0]) if row else 0

        yield url, size


@contextmanager
def redis() -> Measured:
    """The memory of the server."""
    from redis import Redis

    with engine("redis")() as server:
        client = Redis(port=server.port)
        yield server.url(), lambda: int(client.info("memory")["used_memory"])


ENGINES = {"sqlite": sqlite, "postgresql": postgresql, "redis": redis}


# Series


def series(subject: str, _number: int) -> Series:
    """The series that one and a second of a subject add to the metrics."""
    os.environ["RPCWHEEL_METRICS"] = "prometheus"
    from prometheus_client import REGISTRY

    def count() -> int:
        time.sleep(0.1)
        return sum(len(family.samples) for family in REGISTRY.collect())

    with ExitStack() as stack:
        make = SERIES[subject](stack)
        counts = [count()]
        for _ in range(3):
            make(1)
            counts.append(count())
    return Series(subject, counts[1] - counts[0], counts[3] - counts[2])


def successful_methods(stack: ExitStack) -> Make:
    """Methods of a server that were called, client and server in this process."""
    kit = stack.enter_context(rpcwheel.Kit(timeout=5.0))
    pool = stack.enter_context(ThreadPoolExecutor(4))
    server = grpc.server(pool, interceptors=kit.server_interceptors())
    echo = grpc.unary_unary_rpc_method_handler(lambda request, _context: request)
    names = {f"Get{number}": echo for number in range(10)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("shop.Orders", names)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stack.callback(lambda: server.stop(None).wait())
    channel = stack.enter_context(kit.channel(f"127.0.0.1:{port}"))
    called: list[str] = []

    def make(number: int) -> None:
        for _ in range(number):
            called.append(f"/shop.Orders/Get{len(called)}")
            channel.unary_unary(called[-1])(b"")

    return make


def queues(stack: ExitStack) -> Make:
    """Queues of failback with a call each."""
    made: list[object] = []

    def make(_number: int) -> None:
        named = policy().replace(name=f"queue {len(made)}")
        kit = rpcwheel.Kit(methods={GET: MethodPolicy(failback=named)})
        stack.callback(kit.close, drain_timeout=0.0)
        channel = stack.enter_context(kit.channel(NOTHING_LISTENS))
        channel.unary_unary(GET)(b"")
        made.append(kit)

    return make


def channels(stack: ExitStack) -> Make:
    """Channels, to a target each."""
    kit = stack.enter_context(rpcwheel.Kit(timeout=5.0, heartbeat=60.0))
    made: list[object] = []

    def make(_number: int) -> None:
        made.append(stack.enter_context(kit.channel(f"127.0.0.1:{10 + len(made)}")))

    return make


def followed(stack: ExitStack) -> Make:
    """Services that the process follows in a registry, with one instance each."""
    registry = stack.enter_context(rpcwheel.open_registry("memory://series"))
    made: list[object] = []

    def make(_number: int) -> None:
        service = f"shop.Service{len(made)}"
        registry.register(ServiceInstance(service=service, host="127.0.0.1", port=9), wait=30.0)
        made.append(stack.enter_context(rpcwheel.insecure_channel(f"memory://series/{service}")))

    return make


SERIES: dict[str, Callable[[ExitStack], Make]] = {
    "method that a client calls, and its server": successful_methods,
    "method whose calls fail": called_methods(),
    "method with a breaker and a throttle": called_methods(breaker=0.5, throttle=2.0),
    "queue of failback": queues,
    "channel with a heartbeat": channels,
    "service, followed and published": followed,
}


# Threads


def threads(_name: str, _number: int) -> Threads:
    """The threads of a process that uses one thing after the other."""
    steps = {"Python": occupied()[1]}
    with ExitStack() as stack:
        target = stack.enter_context(served())
        bare = stack.enter_context(bare_channel(target))
        bare.unary_unary(GET)(b"", timeout=30.0)
        steps["a channel of gRPC, connected"] = occupied()[1]
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        journal = policy().replace(journal=f"sqlite://{directory}/failback.db", name="journal")
        methods = {
            "/shop.Audit/Push": MethodPolicy(failback=policy()),
            "/shop.Audit/Store": MethodPolicy(failback=journal),
        }
        kit = rpcwheel.Kit(timeout=30.0, heartbeat=3600.0, methods=methods)
        stack.callback(kit.close, drain_timeout=0.0)
        channel = stack.enter_context(kit.channel(target))
        channel.unary_unary(GET)(b"")
        steps["a channel of a kit with a timeout and heartbeats, connected"] = occupied()[1]
        down = stack.enter_context(kit.channel(NOTHING_LISTENS))
        down.unary_unary("/shop.Audit/Push")(b"")
        steps["a queue of failback with a call"] = occupied()[1]
        down.unary_unary("/shop.Audit/Store")(b"")
        steps["a queue with a journal in SQLite"] = occupied()[1]
        registry = stack.enter_context(rpcwheel.open_registry("memory://threads"))
        host, port = target.split(":")
        published = ServiceInstance(service="shop.Orders", host=host, port=int(port))
        registry.register(published, wait=30.0)
        by_name = stack.enter_context(kit.channel("memory://threads/shop.Orders"))
        by_name.unary_unary(GET)(b"")
        steps["a registry in memory, and a channel by name"] = occupied()[1]
        status = stack.enter_context(rpcwheel.Kit(status_port=0))
        assert status.status_address
        steps["the live view"] = occupied()[1]
    return Threads(steps)


def main(step: str, scale: str, name: str) -> None:
    """Measure, and print the row."""
    logging.getLogger("rpcwheel").setLevel(logging.CRITICAL)  # calls fail here on purpose
    sizes = SCALES[scale]
    measured: Growth | Disk | Series | Threads
    if step == "growth":
        measured = growth(name, sizes.number(name))
    elif step == "disk":
        measured = disk(name, sizes.stored)
    elif step == "series":
        measured = series(name, 1)
    else:
        measured = threads(name, 1)
    print_rows([measured])


if __name__ == "__main__":
    main(*sys.argv[1:])
