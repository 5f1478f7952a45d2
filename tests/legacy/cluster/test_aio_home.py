"""What other threads say about a channel is done on its loop, in order; nothing is lost."""

import asyncio
import threading

import pytest

from fixtures.timers import run_threads
from fixtures.waiting import aio_wait_until
from rpcwheel.cluster._aio_home import Home


@pytest.fixture
def told():
    """What jobs raised that are of other threads."""
    return []


@pytest.fixture
def home(timer, told):
    def run(job, whose):
        try:
            job()
        except Exception as error:  # noqa: BLE001 - whatever it is
            told.append((whose, error))

    return Home(timer, run, lambda: told.append("arrived"))


async def test_on_its_loop_a_job_is_done_at_once(home, told):
    done = []
    home.do(lambda: done.append(threading.get_ident()))
    assert (done, told) == ([threading.get_ident()], ["arrived"])
    with pytest.raises(ZeroDivisionError):
        home.do(lambda: 1 / 0)


async def test_jobs_of_other_threads_are_done_there_in_order(home, told):
    home.enter()
    done, here = [], threading.get_ident()

    def say(number):
        home.do(lambda: done.append((number, threading.get_ident())))

    await asyncio.to_thread(lambda: [say(number) for number in range(100)])
    say("last")  # after those of before, though it is here
    await aio_wait_until(lambda: len(done) == 101)
    assert [number for number, _ in done] == [*range(100), "last"]
    assert {where for _, where in done} == {here}
    await asyncio.to_thread(home.do, lambda: 1 / 0)
    await aio_wait_until(lambda: len(told) == 2)
    assert isinstance(told[1][1], ZeroDivisionError)


async def test_many_threads_lose_no_job(home):
    home.enter()
    done = []
    works = [lambda: [home.do(lambda: done.append(1)) for _ in range(200)]] * 4
    await asyncio.to_thread(run_threads, *works)
    await aio_wait_until(lambda: len(done) == 800)


def test_before_there_is_a_loop_jobs_wait_for_it(home, told):
    done = []
    home.do(lambda: done.append(1))
    assert done == []

    async def arrive():
        home.enter()

    asyncio.run(arrive())
    assert (done, told) == ([1], ["arrived"])


def test_once_its_loop_is_closed_nobody_is_hurt_and_another_takes_over(home):
    async def arrive():
        home.enter()

    done = []
    asyncio.run(arrive())
    home.do(lambda: done.append(1))  # nobody is there
    assert done == []

    async def do():
        home.do(lambda: done.append(2))

    asyncio.run(do())
    assert done == [1, 2]


async def test_a_job_for_later_is_done_on_the_loop(home, timer):
    done = []
    home.after(5 * 10**9, lambda: done.append(threading.get_ident()))
    cancelled = home.after(5 * 10**9, lambda: done.append("never"))
    cancelled.cancel()
    await asyncio.to_thread(timer.advance, 5.1)
    await aio_wait_until(lambda: done)
    assert done == [threading.get_ident()]
