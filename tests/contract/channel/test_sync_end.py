"""The end of a channel for threads: who is told of it, and what if a program forgets it."""

import subprocess
import sys
import weakref

import pytest

from fixtures.shop import UNARY_UNARY
from fixtures.waiting import wait_until
from rpcwheel.channel import ReconnectingChannel


@pytest.fixture
def channel(shop, timer):
    with ReconnectingChannel(shop.target, timer=timer) as channel:
        yield channel


def test_who_wants_to_know_is_told_of_the_end_once(channel):
    told = []
    channel.on_close(lambda: told.append(1))
    forget = channel.on_close(lambda: told.append(2))
    channel.on_close(lambda: told.append(channel.closed))
    forget()
    forget()
    channel.close()
    channel.close()
    assert told == [1, True]
    channel.on_close(lambda: told.append(3))
    assert told == [1, True, 3]


def test_whatever_a_listener_raises_the_channel_is_closed(channel):
    def callback():
        raise SystemExit

    call = channel.unary_unary(UNARY_UNARY)
    inner = channel._switch.links.active.channel
    channel.on_close(callback)
    with pytest.raises(SystemExit):
        channel.close()
    with pytest.raises(ValueError, match="closed channel"):
        inner.unary_unary(UNARY_UNARY)(b"x")
    with pytest.raises(ValueError, match="closed channel"):
        call(b"x")


def test_what_forgets_a_callback_keeps_no_channel_alive(shop):
    channel = ReconnectingChannel(shop.target)
    forget, gone = channel.on_close(print), weakref.ref(channel._switch)
    del channel
    assert wait_until(lambda: gone() is None)
    forget()


def test_a_listener_that_raises_does_not_keep_the_channel_open(channel, events):
    told = []
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: told.append(1))
    channel.close()
    assert told == [1]
    (event,) = events
    assert (type(event).__name__, type(event.error)) == ("ListenerFailed", ZeroDivisionError)


# The interpreter's


BEGIN = """
import sys, threading, time
import grpc
from rpcwheel.channel import ReconnectingChannel
channel = ReconnectingChannel(sys.argv[1], backoff=0)
"""

WAYS = {
    "subscribed": """
channel.subscribe(lambda state: None, try_to_connect=True)
time.sleep(0.2)
""",
    "was ready": """
grpc.channel_ready_future(channel).result(20)
""",
    "subscribed and replaced": """
channel.subscribe(lambda state: None, try_to_connect=True)
time.sleep(0.1)
channel.replace(force=True)
channel.replace(force=True)
""",
    "subscribed by a thread without end": """
def look():
    while True:
        try:
            grpc.channel_ready_future(channel).result(0.01)
        except grpc.FutureTimeoutError:
            pass
        channel.replace(force=True)

for _ in range(3):
    threading.Thread(target=look, daemon=True).start()
time.sleep(0.3)
""",
    "amid calls": """
call = channel.unary_stream("/test.Shop/UnaryStream")
streams = [call(b"ab"), call(b"ab")]
next(streams[0])
channel.replace(drain=60)
channel.unary_unary("/test.Shop/UnaryUnary").future(b"x")
channel.replace(drain=0)
""",
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_program_ends_though_its_channel_was_not_closed(shop, pytestconfig, way):
    """gRPC's polling thread is stopped at the exit, and who closes its channel waits for it."""
    run = subprocess.run(
        [sys.executable, "-c", f"{BEGIN}{way}print('end')", shop.target],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (run.stdout, run.stderr) == ("end\n", "")
