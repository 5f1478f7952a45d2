"""The stop of a published server in its own process: signals, event loops, no threads."""

import signal

import grpc
import pytest

from fixtures.programs import run_program
from fixtures.serving_process import HANG, WHO, ServingProcess
from fixtures.waiting import wait_until

STEPS = ["withdraw", "not serving", "wait", "stop", "closed"]


@pytest.fixture
def url(tmp_path):
    return f"sqlite://{tmp_path}/registry.db"


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_sigint_stops_in_order_and_the_previous_handlers_are_restored(world, url):
    with ServingProcess(url, world=world, mine=True, lame_duck=0.1) as process:
        process.send(signal.SIGINT)
        assert process.wait() == 0
        assert process.lines[1:] == [*STEPS, "left", "mine"]


@pytest.mark.parametrize(("world", "second"), [("sync", signal.SIGTERM), ("aio", signal.SIGINT)])
def test_a_second_signal_stops_the_server_at_once(world, second, url):
    with ServingProcess(url, world=world, lame_duck=600, grace=600) as process:
        with grpc.insecure_channel(f"127.0.0.1:{process.port}") as to_server:
            call = to_server.unary_unary(WHO).future(HANG)
            assert wait_until(lambda: "called" in process.lines)
            process.send(signal.SIGTERM)
            assert wait_until(lambda: "wait" in process.lines)
            process.send(second)
            assert wait_until(lambda: "left" in process.lines)
            assert call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
        if world == "aio":  # in sync, the thread of the call goes on
            assert process.wait() == 0
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
    output, _ = run_program(code)
    return output.split()


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
