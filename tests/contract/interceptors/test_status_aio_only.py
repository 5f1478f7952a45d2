"""A status that grpc.aio makes up and later replaces by the server's own, without a callback."""

import asyncio
import selectors

import grpc
import pytest

from fixtures.waiting import aio_wait_until
from rpcwheel.call import CallPolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors.aio import FailbackQueues, intercept_channel

INTERNAL, UNAVAILABLE = grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE
MADE_UP = "Internal error from Core"

OWN_COMES_AFTER_S = 0.002
"""When grpcio 1.85.1 has the server's own status: 0.2 to 2 ms after the other."""


class SkippingSelector(selectors.DefaultSelector):
    """Does not wait for timers: sets the clock of the loop instead."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0 if timeout is not None else None)


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its time is the sum of its timer delays; the duration of the code does not count."""

    def __init__(self):
        self.clock = SkippingSelector()
        super().__init__(self.clock)

    def time(self):
        return self.clock.now


class Refused(grpc.aio.StreamStreamCall):
    """A call that the server refuses while a request is written.

    grpcio 1.85.1 calls done-callbacks for the first status only.
    """

    def __init__(self, own):
        self._own = own
        self._status = None
        self._changed = asyncio.Event()
        self._callbacks = []
        asyncio.get_running_loop().call_later(0.001, self._end)

    def _end(self):
        self._status = INTERNAL, MADE_UP
        self._changed.set()
        for callback in self._callbacks:
            callback(self)
        if self._own:
            asyncio.get_running_loop().call_later(OWN_COMES_AFTER_S, self._replace)

    def _replace(self):
        self._status = UNAVAILABLE, "refused"

    def done(self):
        return self._status is not None

    def cancelled(self):
        return False

    def cancel(self):
        return False

    def time_remaining(self):
        return None

    def add_done_callback(self, callback):
        self._callbacks.append(callback)

    async def code(self):
        await self._changed.wait()
        return self._status[0]

    async def details(self):
        await self._changed.wait()
        return self._status[1]

    async def initial_metadata(self):
        await self._changed.wait()
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata

    async def wait_for_connection(self):
        """Do nothing."""

    async def __aiter__(self):
        await self._changed.wait()
        raise grpc.aio.AioRpcError(
            self._status[0], grpc.aio.Metadata(), grpc.aio.Metadata(), self._status[1]
        )
        yield  # makes it a generator

    async def read(self):
        return grpc.aio.EOF

    async def write(self, request):
        """It is taken."""

    async def done_writing(self):
        """It is taken."""


class Channel(grpc.aio.Channel):
    """Whose calls are refused."""

    def __init__(self, own):
        self._own = own
        self.calls = 0

    def stream_stream(self, *_, **__):
        return self._begin

    unary_unary = unary_stream = stream_unary = stream_stream

    def _begin(self, *_, **__):
        self.calls += 1
        return Refused(self._own)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        """Nothing is open."""

    async def close(self, grace=None):
        """Nothing is open."""

    def get_state(self, try_to_connect=False):
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state):
        """Do nothing: the state never changes."""

    async def channel_ready(self):
        """Do nothing: the channel is READY."""


@pytest.mark.parametrize("own", [True, False], ids=["replaced", "stays"])
def test_a_stream_ends_as_soon_as_the_servers_own_status_is_known(own):
    """If the made-up status is not replaced, the stream ends after half a second."""

    async def call():
        policy = CallPolicy(idempotent=True, retry=RetryPolicy(retry_on="RESOURCE_EXHAUSTED"))
        channel = intercept_channel(Channel(own), policy)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in channel.stream_stream("/a/b")(iter([b"x"])):
                pass
        return failure.value.code(), asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        code, took_s = runner.run(call())
    assert code is (UNAVAILABLE if own else INTERNAL)
    assert took_s < (0.01 if own else 1.0)


async def test_a_delivery_fails_with_the_servers_own_status(timer):
    """After INTERNAL failback would abandon the call; after UNAVAILABLE it retries."""
    channel = Channel(own=True)
    async with FailbackQueues(timer) as queues:
        policy = CallPolicy(
            failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=30.0, default=())
        )
        kept = intercept_channel(channel, policy, timer=timer, queues=queues)
        async for _ in kept.stream_stream("/a/b")(iter([b"x"])):
            """There is no message."""
        timer.advance(30.0)
        await aio_wait_until(
            lambda: channel.calls == 2 and (timer.pending == 1 or queues.pending == 0)
        )
        assert queues.pending == 1
        await queues.close(0)
