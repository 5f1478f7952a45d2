"""The jobs of a channel of `grpc.aio` before its loop is known."""

import asyncio

from rpcwheel.balancer.aio_channel import _LoopJobs


def test_a_job_that_waits_for_the_loop_runs_once_however_often_it_was_submitted():
    jobs, ran = _LoopJobs(), []

    class Owner:
        def notify(self):
            ran.append(asyncio.get_running_loop())

    owner = Owner()
    for _ in range(3):
        jobs.run_soon(owner.notify)
    assert ran == []

    async def enter():
        return jobs.enter()

    loop = asyncio.run(enter())
    assert ran == [loop]
