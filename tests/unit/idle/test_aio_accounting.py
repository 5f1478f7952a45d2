"""When the loop of a grpc.aio server is known to have seen all calls that have arrived."""

import asyncio
import threading
import time

from fixtures.idle_aio_server import idle_server
from fixtures.waiting import WAIT_S, aio_wait_until


async def test_a_pause_fails_while_the_loop_is_blocked_and_counts_when_it_goes_on(timer):
    async with idle_server(timer) as server, server.detect() as detector:
        before_ns, paused = server.tracked.accounted_ns, []
        thread = threading.Thread(target=lambda: paused.append(detector._pause()))
        thread.start()
        thread.join(WAIT_S)  # blocks the loop
        assert paused == [False]
        assert server.tracked.accounted_ns == before_ns
        assert detector._unknown_calls_since_ns(False) == before_ns
        await aio_wait_until(lambda: server.tracked.accounted_ns > before_ns)


async def test_a_loop_with_long_rounds_needs_several_until_it_has_seen_all_calls(timer):
    loop, rounds, done = asyncio.get_running_loop(), [], []

    def turn() -> None:
        rounds.append(1)
        time.sleep(0.06)
        if not done:
            loop.call_soon(turn)

    async with idle_server(timer) as server, server.detect() as detector:
        turn()
        assert detector._account_on_loop(lambda: done.append(len(rounds)))
        await aio_wait_until(lambda: done)
        assert done[0] > 4


async def test_an_arriving_call_may_have_come_since_all_calls_were_last_known(timer):
    async with idle_server(timer) as server, server.channel() as channel:
        detector = server.detect()
        server.tracked.accounted_ns = early_ns = time.monotonic_ns() - 5 * 10**9
        call = channel.stream_unary("/test.Idle/await_call")()  # its headers, and no more
        await call.wait_for_connection()
        await aio_wait_until(server.waiting_calls)
        server.tracked.accounted_ns = time.monotonic_ns()
        assert detector._unknown_calls_since_ns(True) == early_ns
        await call.write(b"1")
        await call.done_writing()
        assert await call == b"1"
        assert detector._unknown_calls_since_ns(True) is None
        detector.close()
