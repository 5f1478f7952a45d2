"""The stop of a published server in its own process: signals, event loops, no threads."""

import contextlib
import signal
import subprocess
import sys
import threading

import grpc
import pytest

from fixtures.serving_process import HANG, WHO, ServingProcess
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.resolver import insecure_channel

STEPS = ["withdraw", "not serving", "wait", "stop", "closed"]


@pytest.fixture
def url(tmp_path):
    return f"sqlite://{tmp_path}/registry.db"


def test_no_call_fails_in_a_rolling_restart_under_load(url):
    """A server of each world is replaced by one of the other, which is started first."""

    def start(world):
        return processes.enter_context(ServingProcess(url, world=world, lame_duck=600.0))

    with (
        contextlib.ExitStack() as processes,
        insecure_channel(f"{url}?service=shop.Orders") as to_service,
    ):
        old = [start(world) for world in ("sync", "aio")]
        who = to_service.unary_unary(WHO)
        answers, failures, over = ([], []), [], threading.Event()

        def call(mine):
            while not over.is_set():
                try:
                    mine.append(who(b"", timeout=WAIT_S))
                except grpc.RpcError as error:
                    failures.append(error)

        def all_call_anew():
            """Wait until each call that is in flight now has ended."""
            before = [len(mine) for mine in answers]
            assert wait_until(
                lambda: (
                    all(len(mine) > one for mine, one in zip(answers, before, strict=True))
                    or failures
                )
            )

        def is_known(process):
            return any(one.instance.port == process.port for one in to_service.subchannels)

        assert wait_until(lambda: len(to_service.subchannels) == 2)
        callers = [threading.Thread(target=call, args=(mine,), daemon=True) for mine in answers]
        for one in callers:
            one.start()
        try:
            for one, world in zip(old, ("aio", "sync"), strict=True):
                new = start(world)
                assert wait_until(lambda: is_known(new))  # noqa: B023
                one.send(signal.SIGTERM)
                assert wait_until(lambda: not is_known(one))  # noqa: B023
                all_call_anew()
                one.send(signal.SIGINT)  # the second ends it at once
                assert one.wait() == 0
                assert one.lines[1:] == [*STEPS, "left"]
        finally:
            over.set()
            for one in callers:
                one.join(WAIT_S)
    assert failures == []
    assert all(answers)


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_sigint_stops_in_order_and_the_previous_handlers_are_restored(world, url):
    with ServingProcess(url, world=world, mine=True, lame_duck=0.1) as process:
        process.send(signal.SIGINT)
        assert process.wait() == 0
        assert process.lines[1:] == [*STEPS, "left", "mine"]


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_a_second_signal_stops_the_server_at_once(world, url):
    with ServingProcess(url, world=world, lame_duck=600, grace=600) as process:
        with grpc.insecure_channel(f"127.0.0.1:{process.port}") as to_server:
            call = to_server.unary_unary(WHO).future(HANG)
            assert wait_until(lambda: "called" in process.lines)
            process.send(signal.SIGTERM)
            assert wait_until(lambda: "wait" in process.lines)
            process.send(signal.SIGTERM)
            assert wait_until(lambda: "left" in process.lines)
            assert call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
        assert process.lines[1:] == ["called", *STEPS, "left"]


def test_a_dead_registry_does_not_delay_the_exit():
    unreachable = "redis://127.0.0.1:1"
    with ServingProcess(unreachable, published=False, lame_duck=0.1, host="127.0.0.1") as process:
        process.send(signal.SIGTERM)
        assert process.wait() == 0
        assert process.lines[1:] == [*STEPS, "left"]


def test_signals_are_not_handled_without_the_setting():
    with ServingProcess("memory://", signals=False) as process:
        process.send(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
        assert process.lines[1:] == []


NO_THREADS = """if True:
    import threading, grpc
    from concurrent.futures import ThreadPoolExecutor
    from rpcwheel.publisher import Publisher
    from rpcwheel.testing import FlakyBackend

    server = grpc.server(ThreadPoolExecutor(2))
    settings = {"port": 0, "lame_duck": 0.01, "grace": 0.1}
    published = Publisher(server, "memory://", "shop.Orders", **settings)
    published.start()
    published.wait_published(60)
    while any(one.name.startswith("rpcwheel-worker") for one in threading.enumerate()):
        pass

    def start(self):
        raise RuntimeError("can't start new thread")

    threading.Thread.start = start
    published.stop()
    print(published.state)
"""

LOOP_ENDS = """if True:
    import asyncio, grpc.aio, threading
    from rpcwheel.events import ShutdownStep, add_sink
    from rpcwheel.publisher.aio import Publisher

    waits, closed = asyncio.Event(), threading.Event()

    def say(event):
        if isinstance(event, ShutdownStep):
            print(event.step)
            if event.step == "wait":
                loop.call_soon_threadsafe(waits.set)
            elif event.step == "closed":
                closed.set()

    add_sink(say)

    async def main():
        global loop
        loop = asyncio.get_running_loop()
        settings = {"port": 0, "lame_duck": 600, "grace": 600}
        published = Publisher(grpc.aio.server(), "memory://", "shop.Orders", **settings)
        await published.start()
        published.begin_stop()
        await waits.wait()

    asyncio.run(main())
    closed.wait(60)  # unless this process stood still, it is
"""

NOT_STOPPED = """if True:
    import asyncio, grpc.aio
    from rpcwheel.registry import open_registry
    from rpcwheel.publisher.aio import Publisher

    async def main():
        settings = {"port": 0, "lame_duck": 600, "grace": 600}
        published = Publisher(grpc.aio.server(), "memory://gone", "shop.Orders", **settings)
        await published.start()
        print(await published.wait_published(60))
        return published

    published = asyncio.run(main())
    while published.state != "closed":  # unless this process stood still, it is
        pass
    with open_registry("memory://gone") as seen:
        print(published.state, len(seen.lookup("shop.Orders").instances))
"""

LOOP_GONE = """if True:
    import asyncio
    import grpc.aio
    from rpcwheel.registry import open_registry
    from rpcwheel.publisher.aio import Publisher

    async def main():
        global published
        settings = {"port": 0, "lame_duck": 600, "grace": 600}
        published = Publisher(grpc.aio.server(), "memory://gone", "shop.Orders", **settings)
        await published.start()
        await published.wait_published(60)
        if ENDING:
            published.begin_stop()
            while published.state != "ending":
                await asyncio.sleep(0.01)

    async def end():
        if ENDING:
            await published.stop()
            await published.stop()
        else:
            published.begin_stop()
            while published.state != "closed":
                await asyncio.sleep(0.01)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    asyncio.run(end())
    with open_registry("memory://gone") as seen:
        print(published.state, len(seen.lookup("shop.Orders").instances))
"""


def output_of(code):
    """The words that a program prints; in its own process, as grpc.aio needs one loop at a time."""
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=3 * WAIT_S, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


FORGOTTEN = """if True:
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry import Registry
    from rpcwheel.registry.backend import Settings
    from rpcwheel.registry.backends import open_backend
    from rpcwheel.testing import FlakyBackend
    backend = FlakyBackend(open_backend("memory://", Settings(1800.0, 600.0)))
    registry = Registry(backend)
    one = ServiceInstance(service="shop", host="a", port=1)
    registry.register(one, wait=60)
    backend.freeze()
    registry.unregister(one)
    registry.subscribe("shop")
"""


def test_a_registry_that_is_not_closed_does_not_delay_the_exit():
    assert output_of(FORGOTTEN) == []


def test_stop_works_if_no_thread_can_be_started():
    assert output_of(NO_THREADS) == ["closed"]


def test_a_lame_duck_does_not_delay_the_end_of_its_loop():
    assert output_of(LOOP_ENDS) == ["withdraw", "not", "serving", "wait", "closed"]


def test_the_end_of_its_loop_withdraws_an_aio_server_that_is_not_stopped():
    assert output_of(NOT_STOPPED) == ["True", "closed", "0"]


@pytest.mark.parametrize("ending", [False, True])
def test_an_aio_publisher_whose_loop_is_closed_can_be_stopped_on_another_loop(ending):
    assert output_of(f"ENDING = {ending}\n{LOOP_GONE}") == ["closed", "0"]
