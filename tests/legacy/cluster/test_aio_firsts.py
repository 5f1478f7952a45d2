"""What a caller sends is taken once, however many tries there are."""

import asyncio

import grpc
import pytest

from fixtures.aio_doors import others, sent
from fixtures.waiting import aio_wait_until
from rpcwheel.cluster._aio_firsts import as_now, firsts_of, sealed


async def all_of(feed):
    """What a try that has got a connection reads."""
    if hasattr(feed, "__aiter__"):
        return [message async for message in feed]
    return list(feed)


async def first_of(feed):
    """What a try that gets no connection reads."""
    return await anext(feed) if hasattr(feed, "__aiter__") else next(feed)


GIVEN = {"plain": iter, "asynchronous": lambda messages: sent(*messages)}


@pytest.fixture(params=GIVEN.values(), ids=GIVEN.keys())
def given(request):
    """Makes an iterator of either sort."""
    return request.param


async def test_each_try_begins_with_the_first(given):
    firsts = firsts_of(given([1, 2, 3]))
    assert [await first_of(firsts.feed()) for _ in range(3)] == [1, 1, 1]
    assert firsts.whole
    assert await all_of(firsts.feed()) == [1, 2, 3]
    assert not firsts.whole


async def test_one_without_messages_is_empty_for_each_try(given):
    firsts = firsts_of(given([]))
    assert [await all_of(firsts.feed()) for _ in range(2)] == [[], []]
    assert firsts.whole


async def test_what_the_iterator_raises_is_raised_for_each_try():
    async def raising():
        raise KeyError("a bug")
        yield

    firsts = firsts_of(raising())
    for _ in range(2):
        with pytest.raises(KeyError):
            await first_of(firsts.feed())


async def test_a_first_that_is_still_to_come_comes_to_the_next_try():
    gate = asyncio.Event()

    async def slow():
        await gate.wait()
        yield 1
        yield 2

    firsts = firsts_of(slow())
    tries = [asyncio.create_task(first_of(firsts.feed())) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*tries) == [1, 1, 1]
    assert await all_of(firsts.feed()) == [1, 2]


async def test_nobody_waits_for_it_once_the_call_has_ended():
    ended = []

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        yield

    before = len(others())
    firsts = firsts_of(never())
    reading = [asyncio.create_task(first_of(firsts.feed())) for _ in range(2)]
    await asyncio.sleep(0)
    firsts.close()
    for task in reading:
        with pytest.raises(asyncio.CancelledError):
            await task
    await aio_wait_until(lambda: len(others()) == before)
    assert ended == [True]


async def test_closing_ends_no_try_that_has_begun():
    firsts = firsts_of(sent(1, 2))
    feed = firsts.feed()
    assert await anext(feed) == 1
    firsts.close()
    assert await anext(feed) == 2
    firsts_of([1]).close()


def test_what_is_no_iterator_is_refused():
    with pytest.raises(TypeError):
        firsts_of(7)


# One request


def test_a_request_that_its_caller_changes_is_as_it_was():
    message = bytearray(b"as it was")
    data = sealed(message, bytes)
    message[:] = b"changed"
    assert data == b"as it was"


def test_what_can_not_be_serialized_is_nothing_and_is_logged_as_by_grpc(caplog):
    assert sealed("text", bytes) is None
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("grpc._common", "ERROR")
    assert isinstance(record.exc_info[1], TypeError)


def test_metadata_that_its_caller_changes_are_as_they_were():
    pairs = [("a", "1"), ("b", "2")]
    given = grpc.aio.Metadata(*pairs)
    copy, plain = as_now(given), as_now(pairs)
    given["a"] = "changed"
    pairs.clear()
    assert (copy["a"], type(copy)) == ("1", grpc.aio.Metadata)
    assert plain == (("a", "1"), ("b", "2"))
