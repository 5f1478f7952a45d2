"""Request streams of `grpc.aio` that several attempts may send."""

import asyncio
import itertools

import pytest

from fixtures.aio_channels import read_all
from rpcwheel.call.aio_requests import RequestStream


async def test_only_the_iterator_of_the_newest_attempt_gets_new_messages():
    gate = asyncio.Event()

    async def source():
        yield b"a"
        await gate.wait()
        yield b"b"

    requests = RequestStream(source(), 100)
    old = requests.replay()
    assert await anext(old) == b"a"
    waiting = asyncio.ensure_future(anext(old, "end"))
    await asyncio.sleep(0)
    new = requests.replay()
    assert await waiting == "end"
    assert await anext(new) == b"a"
    rest = asyncio.ensure_future(read_all(new))
    gate.set()
    assert await rest == [b"b"]
    assert requests.buffer.is_over


async def test_a_canceled_attempt_loses_no_message():
    gate = asyncio.Event()

    async def source():
        await gate.wait()
        yield b"a"

    requests = RequestStream(source(), 100)
    waiting = asyncio.ensure_future(anext(requests.replay()))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    assert await read_all(requests.replay()) == [b"a"]


async def test_an_iterator_is_read_one_message_at_a_time():
    read = []

    async def source():
        for number in range(3):
            read.append(number)
            yield number

    requests = RequestStream(source(), 100).replay()
    await anext(requests)
    await asyncio.sleep(0)
    assert read == [0]


async def test_a_closed_stream_is_not_read():
    async def source():
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            ended.set()

    ended = asyncio.Event()
    requests = RequestStream(source(), 100)
    waiting = asyncio.ensure_future(anext(requests.replay(), "end"))
    await asyncio.sleep(0.01)
    requests.close()
    assert await waiting == "end"
    await ended.wait()


async def test_the_loop_runs_between_the_messages_of_a_plain_iterator():
    requests = RequestStream(itertools.repeat(b"", 10_000), 10_000_000)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await requests.read_rest()
    assert not requests.buffer.is_over
