"""What a loop that is late is known to have seen of what has come in."""

import asyncio
import threading
import time

from fixtures.idle_aio_server import idle_server
from fixtures.waiting import WAIT_S, aio_wait_until


async def test_what_came_in_counts_as_heard_once_the_loop_came_round_however_late(timer):
    async with idle_server(timer) as server, server.detect() as detector:
        before_ns, settled = server.table.heard_ns, []
        thread = threading.Thread(target=lambda: settled.append(detector._settle()))
        thread.start()
        thread.join(WAIT_S)  # the loop stands
        assert settled == [False]
        assert server.table.heard_ns == before_ns
        assert server.table.coming_ago_ns(settled=False) >= time.monotonic_ns() - before_ns - 10**9
        await aio_wait_until(lambda: server.table.heard_ns > before_ns)


async def test_a_loop_whose_rounds_take_long_has_had_several_before_it_counts(timer):
    loop, rounds = asyncio.get_running_loop(), []

    def turn() -> None:
        rounds.append(1)
        time.sleep(0.06)
        if not heard:
            loop.call_soon(turn)

    async with idle_server(timer) as server, server.detect() as detector:
        heard: list[int] = []
        turn()
        assert detector._ask(lambda: heard.append(len(rounds)))
        await aio_wait_until(lambda: heard)
        assert heard[0] > 4


async def test_calls_on_their_way_are_known_by_what_was_heard_before_they_came(timer):
    async with idle_server(timer) as server, server.channel() as channel:
        server.table.heard_ns = early_ns = time.monotonic_ns() - 5 * 10**9
        call = channel.stream_unary("/test.Idle/await_call")()  # its headers, and no more
        await call.wait_for_connection()
        await aio_wait_until(lambda: server.table._arriving)
        server.table.heard_ns = time.monotonic_ns()
        assert list(server.table._arriving.values()) == [early_ns]
        assert server.table.coming_ago_ns(settled=True) >= 5 * 10**9
        await call.write(b"1")
        await call.done_writing()
        assert await call == b"1"
        assert not server.table._arriving
