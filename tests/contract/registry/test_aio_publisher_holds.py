"""What must not keep an aio server's end from coming, and what its end must not undo."""

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from fixtures.shops import SERVICE
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.observe import ServingEnds, add_sink, remove_sink
from rpcwheel.registry.aio import Publisher, open_registry
from rpcwheel.timer import WheelTimer

QUICK = {"port": 0, "lame_duck": 0.05, "grace": 5.0}


@pytest.fixture
def shop(make_aio_shop):
    return make_aio_shop()


async def test_a_sink_that_hangs_holds_up_no_end_and_no_loop(shop, memory):
    goes_on = threading.Event()

    def hang(event):
        if isinstance(event, ServingEnds):
            goes_on.wait(60)

    add_sink(hang)
    try:
        published = Publisher(shop.server, memory, SERVICE, **QUICK)
        await published.start()
        published.begin_stop()
        assert await published.wait(WAIT_S)
    finally:
        remove_sink(hang)
        goes_on.set()


async def test_what_was_unregistered_by_hand_is_not_published_again_by_the_end(shop, memory):
    shown = []
    async with open_registry(memory) as registry, open_registry(memory) as other:
        published = Publisher(shop.server, registry, SERVICE, **QUICK)
        await published.start()
        await published.registrations[0].unregister(wait=WAIT_S)
        seen = other.subscribe(SERVICE, lambda snapshot: shown.append(len(snapshot.instances)))
        await seen.wait(WAIT_S)
        await published.stop()
        await other.lookup(SERVICE)
        seen.close()
    assert shown == [0]


async def test_a_timer_that_is_stopped_while_clients_hear_of_it_holds_up_no_end(shop, memory):
    timer = WheelTimer()
    published = Publisher(shop.server, memory, SERVICE, timer=timer, **QUICK | {"lame_duck": 0.5})
    await published.start()
    published.begin_stop()
    await aio_wait_until(
        lambda: published._core.under_way and published._core.under_way.value == "wait"
    )
    await aio_wait_until(lambda: timer.pending)
    timer.stop()
    assert await published.wait(WAIT_S)


async def test_a_handler_that_the_loop_has_is_refused_as_it_would_be_called_beside(shop, memory):
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, print)
    published = Publisher(shop.server, memory, SERVICE, signals=True, **QUICK)
    try:
        with pytest.raises(ConfigurationError, match=r"SIGTERM has a handler of loop\.add_signal"):
            await published.start()
        assert published.state == "new"
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        await published.stop()


ENDS = """if True:
    import asyncio, os, signal
    import grpc.aio
    from rpcwheel.registry.aio import Publisher

    async def main():
        settings = {"port": 0, "lame_duck": 0.01, "grace": 0.1, "signals": True}
        published = Publisher(grpc.aio.server(), "memory://", "shop.Orders", **settings)
        await published.start()
        os.kill(os.getpid(), signal.SIGTERM)
        await published.wait(20)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(20)

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("as before")
"""

LOOP_GONE = """if True:
    import asyncio, sys
    import grpc.aio
    from rpcwheel.registry.aio import Publisher
    from rpcwheel.registry.sync import open_registry

    async def main():
        global published
        settings = {"port": 0, "lame_duck": 60, "grace": 60}
        published = Publisher(grpc.aio.server(), "memory://gone", "shop.Orders", **settings)
        await published.start()
        await published.wait_published(5)
        if WHEN == "ending":
            published.begin_stop()
            await asyncio.sleep(0.3)

    async def end():
        if HOW == "stop":
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


def ran(code):
    """What a program says; in a process of its own, as grpc.aio bears one loop at a time."""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return run.stdout.strip() or run.stderr


def test_after_the_end_signals_are_as_before():
    assert ran(ENDS) == "as before"


@pytest.mark.parametrize("how", ["stop", "begin_stop"])
@pytest.mark.parametrize("when", ["serving", "ending"])
def test_what_outlives_its_loop_can_be_taken_out_on_another(how, when):
    assert ran(f"HOW, WHEN = {how!r}, {when!r}\n{LOOP_GONE}") == "closed 0"
