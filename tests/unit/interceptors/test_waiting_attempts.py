"""Attempts of `grpc.aio` that wait for a place in a concurrency limit."""

import asyncio

from fixtures.waiting import wait_until
from rpcwheel.admission import ConcurrencyPolicy
from rpcwheel.admission.method import Admitted
from rpcwheel.admission.targets import AdmissionSettings, Breakers
from rpcwheel.interceptors.aio_admission import wait_on_loop

MANY = 300
"""More attempts than functions may call each other."""


def test_attempts_of_a_closed_loop_leave_their_places_to_others(timer):
    settings = AdmissionSettings(concurrency=ConcurrencyPolicy(max_calls=1, max_wait=60.0))
    target = Breakers().admission("shop:1", timer)
    admission = target.method("/shop.Orders/Get", settings)
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
