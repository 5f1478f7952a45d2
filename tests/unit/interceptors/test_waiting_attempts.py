"""Attempts of `grpc.aio` that wait for a place in a concurrency limit, or have one."""

import asyncio
from types import SimpleNamespace

import pytest

from fixtures.waiting import wait_until
from rpcwheel.admission import ConcurrencyPolicy
from rpcwheel.admission.method import Admitted
from rpcwheel.admission.targets import AdmissionSettings, Breakers
from rpcwheel.interceptors.aio_admission import (
    begin_admitted,
    begin_admitted_awaited,
    wait_on_loop,
)

MANY = 300
"""More attempts than functions may call each other."""


@pytest.fixture
def admission(timer):
    settings = AdmissionSettings(concurrency=ConcurrencyPolicy(max_calls=1, max_wait=60.0))
    target = Breakers().admission("shop:1", timer)
    yield target.method("/shop.Orders/Get", settings)
    del target  # it keeps the state of the method


def test_attempts_of_a_closed_loop_leave_their_places_to_others(admission):
    running, loop = admission.enter(), asyncio.new_event_loop()

    async def begin():
        tasks = [asyncio.create_task(wait_on_loop(admission.enter())) for _ in range(MANY)]
        await asyncio.sleep(0)
        return tasks

    tasks = loop.run_until_complete(begin())
    loop.close()
    assert admission.status().waiting == MANY
    admission.end(running, "OK")
    assert wait_until(lambda: (admission.status().running, admission.status().waiting) == (0, 0))
    assert isinstance(admission.enter(), Admitted)
    for task in tasks:
        task._log_destroy_pending = False


def begin_of_channel(admission, start):
    calls = SimpleNamespace(state=SimpleNamespace(loop=None), kind=None)
    return begin_admitted(calls, admission, start, b"x", timeout=None, metadata=None)


def begin_of_interceptors(admission, start):
    async def start_at_once(details, request):
        return start(request)

    details = SimpleNamespace(timeout=None)
    return asyncio.create_task(
        begin_admitted_awaited(None, admission, start_at_once, details, b"x")
    )


@pytest.mark.parametrize("begin", [begin_of_channel, begin_of_interceptors])
def test_an_attempt_that_runs_when_its_loop_is_closed_leaves_its_place_to_others(admission, begin):
    calls = []

    async def run():
        calls.append(begin(admission, lambda *_, **__: asyncio.get_running_loop().create_future()))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert admission.status().running == 1
    assert isinstance(admission.enter(), Admitted)
