"""No call of a method that is not idempotent is executed twice, whatever becomes of its server.

Servers die in the middle of their calls, some of them right after they relayed the UNAVAILABLE of
an upstream, which reads as if nothing had been sent; connections are reset and replaced; the
machine and the interpreter are busy. Calls of idempotent methods go through the same storm. Some of
them are executed twice: so a retry that must not be made would be seen.
"""

import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
import threading
import time
from functools import partial

import grpc
import pytest

from fixtures.dying_servers import RELAYED, DyingServers
from fixtures.grpc_servers import IMPATIENT
from fixtures.proxy import Proxy
from fixtures.waiting import WAIT_S
from rpcwheel import HeartbeatPolicy, Kit, MethodPolicy, RetryPolicy, aio
from rpcwheel.balancer import BalancedChannel
from rpcwheel.balancer.aio_channel import BalancedChannel as AioBalancedChannel
from rpcwheel.registry import ServiceInstance
from rpcwheel.transport import ReconnectingChannel
from rpcwheel.transport.aio import ReconnectingChannel as AioReconnectingChannel

DEATHS, RELAYS = 105, 35
"""Of servers, in each of the two worlds; and how many relayed failures clients must have seen."""

CALLERS = 2
"""Of each channel, at the same time: so it connects again while one of them reads its status."""

ENOUGH_S = 20 * WAIT_S
"""Within which so many servers have died and each way to make a call was executed. About 30 s; more
than 90 s beside three more copies of this test on two processors; 336 s at a load of 16 there."""

pytestmark = pytest.mark.timeout(ENOUGH_S + 2 * WAIT_S)

ONCE, AGAIN = "Once", "Again"
"""The service whose methods are not idempotent, and the one whose methods are."""

ROUND_ROBIN = [*IMPATIENT, ("grpc.lb_policy_name", "round_robin")]
"""For a channel that connects again at once, also without a call."""

SETTINGS = {
    "timeout": WAIT_S,
    "retry": RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=6, backoff=0.02, retry_budget=None),
    "heartbeat": HeartbeatPolicy(interval=0.1, timeout=0.3),
    "methods": {f"/storm.{AGAIN}/*": MethodPolicy(idempotent=True)},
}

BURN = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
while True:
    pass
"""


@pytest.fixture
def burners():
    """Two processes that do nothing but use the processors."""
    with contextlib.ExitStack() as started:
        for _ in range(2):
            command = [sys.executable, "-S", "-c", BURN]
            burner = started.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            started.callback(burner.kill)
        yield


@pytest.fixture
def servers(tmp_path, burners):
    with DyingServers(tmp_path / "executed", seed=random.randrange(1 << 30)) as servers:
        yield servers


@pytest.fixture
def proxy(servers):
    with Proxy(servers.target) as proxy:
        yield proxy


@pytest.fixture
def busy_threads():
    """Threads that always want the interpreter."""
    over = threading.Event()

    def work():
        while not over.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join(WAIT_S)


class Storm:
    """The calls that are made, and what becomes of them."""

    def __init__(self, servers):
        self.servers = servers
        self.over = threading.Event()
        self.calm = threading.Event()
        """Set when enough servers have died: from then on connections are left alone, so that each
        way to make a call is executed."""
        self.wrong = []
        self._relayed = 0
        self._ways = set()
        self._numbers = itertools.count()

    def calls(self, name, channel, styles_of):
        """Pairs of a way to make a call and what makes it, until the storm is over."""
        calls = {
            f"{name}, {style}, {service}": begin
            for service in (ONCE, AGAIN)
            for style, begin in styles_of(channel, service).items()
        }
        self._ways.update(calls)
        for way in itertools.cycle(random.sample(list(calls), len(calls))):
            if self.over.is_set():
                return
            yield way, partial(calls[way], f"{way} {next(self._numbers)}".encode())

    def failed(self, way, error):
        """Take note of how a call has failed."""
        if isinstance(
            error, asyncio.InvalidStateError | asyncio.CancelledError | grpc.aio.InternalError
        ):
            return  # grpc.aio 1.85, from write() and done_writing() of a call that has just ended
        if not isinstance(error, grpc.RpcError) or error.code() is grpc.StatusCode.UNKNOWN:
            self.wrong.append((way, error))
        elif error.details() == RELAYED:
            self._relayed += 1

    def ride_out(self):
        """Wait until enough servers have died, and all that must happen before the verdict has."""
        end = time.monotonic() + ENOUGH_S
        while True:
            executed, deaths = self.servers.executed(), self.servers.deaths
            unused = self._ways - {call.rpartition(" ")[0] for call in executed}
            repeated = sum(AGAIN in call and count > 1 for call, count in executed.items())
            if deaths >= DEATHS and self._relayed >= RELAYS and repeated:
                self.calm.set()
                if not unused:
                    return
            progress = f"{deaths} deaths, {self._relayed} relayed, {repeated} repeated"
            assert time.monotonic() < end, f"{progress}, never executed: {unused}"
            time.sleep(0.1)

    def executed_twice(self):
        """The calls of methods that are not idempotent that were executed more than once."""
        executed = self.servers.executed().items()
        return {call: count for call, count in executed if ONCE in call and count > 1}


def interceptors_of(kit):
    """Interceptors with a kit's policies; its heartbeat would have no effect on them, and warn."""
    return type(kit).from_policy(kit.policy.replace(heartbeat=None)).client_interceptors()


# --- Threads ---


def instances_at(target):
    """The server as a service of one instance, and again under another id."""
    host, _, port = target.rpartition(":")
    ids = ("one", "two")
    return [ServiceInstance(service="storm", host=host, port=int(port), id=id_) for id_ in ids]


def channels_of(kit, target, options, opened):
    """The channels through which calls are made, by name."""
    given = [opened.enter_context(grpc.insecure_channel(target, options)) for _ in range(2)]
    own = opened.enter_context(ReconnectingChannel(target, options=options, backoff=0))
    balanced = BalancedChannel("storm", instances_at(target), options=options)
    opened.enter_context(balanced)
    channels = {
        "client_interceptors": grpc.intercept_channel(given[0], *interceptors_of(kit)),
        "intercept_channel": kit.intercept_channel(given[1]),
        "kit.channel": opened.enter_context(kit.channel(target, options=options)),
        "ReconnectingChannel": kit.intercept_channel(own),
        "BalancedChannel": kit.intercept_channel(balanced),
    }
    return channels, own


def styles_of(channel, service):
    """Every way to make a call of each kind, by name."""
    unary = channel.unary_unary(f"/storm.{service}/UnaryUnary")
    pulled = channel.unary_stream(f"/storm.{service}/UnaryStream")
    pushed = channel.stream_unary(f"/storm.{service}/StreamUnary")
    both = channel.stream_stream(f"/storm.{service}/StreamStream")
    return {
        "unary": unary,
        "unary with_call": unary.with_call,
        "unary future": lambda given: unary.future(given).result(),
        "unary waiting": lambda given: unary(given, wait_for_ready=True),
        "pulled": lambda given: list(pulled(given)),
        "pushed": lambda given: pushed(iter([given, given])),
        "pushed with_call": lambda given: pushed.with_call(iter([given, given])),
        "pushed future": lambda given: pushed.future(iter([given, given])).result(),
        "both": lambda given: list(both(iter([given, given]))),
    }


def test_no_call_is_executed_twice_unless_its_method_is_idempotent(servers, proxy, busy_threads):
    storm = Storm(servers)

    def call(name, channel):
        for way, begin in storm.calls(name, channel, styles_of):
            try:
                begin()
            except BaseException as error:  # noqa: BLE001 - some fail the test
                storm.failed(way, error)

    def disturb(channels):
        while not (storm.over.is_set() or storm.calm.wait(random.uniform(0.02, 0.1))):
            proxy.reset()
            random.choice(channels).reconnect("storm", drain_timeout=0, force=True)

    with contextlib.ExitStack() as opened:
        kit = opened.enter_context(Kit(**SETTINGS))
        jobs, replaced = [], []
        for target, options in ((servers.target, ROUND_ROBIN), (proxy.target, IMPATIENT)):
            channels, own = channels_of(kit, target, options, opened)
            replaced.append(own)
            jobs += [partial(call, *channel) for channel in channels.items()] * CALLERS
        threads = [threading.Thread(target=job) for job in (*jobs, partial(disturb, replaced))]
        for thread in threads:
            thread.start()
        try:
            storm.ride_out()
        finally:
            storm.over.set()
            for thread in threads:
                thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert storm.executed_twice() == {}
    assert storm.wrong == []


# --- grpc.aio ---


async def aio_channels_of(kit, target, options, opened):
    inner = interceptors_of(kit)
    bare = grpc.aio.insecure_channel(target, options, interceptors=inner)
    given = grpc.aio.insecure_channel(target, options)
    own = AioReconnectingChannel(target, options=options, backoff=0)
    named = kit.channel(target, options=options)
    balanced = AioBalancedChannel("storm", instances_at(target), options=options)
    for channel in (bare, given, own, named, balanced):
        await opened.enter_async_context(channel)
    channels = {
        "client_interceptors": bare,
        "intercept_channel": kit.intercept_channel(given),
        "kit.channel": named,
        "ReconnectingChannel": kit.intercept_channel(own),
        "BalancedChannel": kit.intercept_channel(balanced),
    }
    return channels, own


def aio_styles_of(channel, service):
    unary = channel.unary_unary(f"/storm.{service}/UnaryUnary")
    pulled = channel.unary_stream(f"/storm.{service}/UnaryStream")
    pushed = channel.stream_unary(f"/storm.{service}/StreamUnary")
    both = channel.stream_stream(f"/storm.{service}/StreamStream")

    async def twice(given):
        for _ in range(2):
            yield given

    async def iterate(call):
        async for _ in call:
            """Nothing to see."""

    async def read(call):
        while await call.read() is not grpc.aio.EOF:
            """Nothing to see."""

    async def write(call, given):
        await call.write(given)
        await call.done_writing()
        return call

    async def written(given):
        await (await write(pushed(), given))

    async def written_and_read(given):
        await read(await write(both(), given))

    return {
        "unary": unary,
        "unary waiting": lambda given: unary(given, wait_for_ready=True),
        "pulled": lambda given: iterate(pulled(given)),
        "pulled by read": lambda given: read(pulled(given)),
        "pushed": lambda given: pushed(iter([given, given])),
        "pushed by an async iterator": lambda given: pushed(twice(given)),
        "pushed by write": written,
        "both": lambda given: iterate(both(iter([given, given]))),
        "both by write and read": written_and_read,
    }


async def test_no_call_of_grpc_aio_is_executed_twice_unless_its_method_is_idempotent(
    servers, proxy, busy_threads
):
    storm = Storm(servers)

    async def call(name, channel):
        for way, begin in storm.calls(name, channel, aio_styles_of):
            try:
                await begin()
            except BaseException as error:  # noqa: BLE001 - some fail the test
                storm.failed(way, error)

    async def disturb(channels):
        while not (storm.over.is_set() or storm.calm.is_set()):
            await asyncio.sleep(random.uniform(0.02, 0.1))
            await asyncio.to_thread(proxy.reset)
            random.choice(channels).reconnect("storm", drain_timeout=0, force=True)

    async with contextlib.AsyncExitStack() as opened:
        kit = await opened.enter_async_context(aio.Kit(**SETTINGS))
        tasks, replaced = [], []
        for target, options in ((servers.target, ROUND_ROBIN), (proxy.target, IMPATIENT)):
            channels, own = await aio_channels_of(kit, target, options, opened)
            replaced.append(own)
            callers = [channel for channel in channels.items() for _ in range(CALLERS)]
            tasks += [asyncio.create_task(call(*channel)) for channel in callers]
        tasks.append(asyncio.create_task(disturb(replaced)))
        try:
            await asyncio.to_thread(storm.ride_out)
        finally:
            storm.over.set()
            _, running = await asyncio.wait(tasks, timeout=WAIT_S)
        assert not running
    assert storm.executed_twice() == {}
    assert storm.wrong == []
