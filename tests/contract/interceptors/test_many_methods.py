"""Memory stays bounded when a proxy's clients invent method names."""

import contextlib
import gc
from collections import Counter

import grpc

from rpcwheel import RetryPolicy
from rpcwheel.call import CallPolicy, DeadlinePolicy
from rpcwheel.interceptors import aio, sync

NAMES = [f"/test.Invented/Method{number}" for number in range(15_000)]
MOST = 10_000
"""Objects of one type that may be kept; less than one for each name."""

POLICY = CallPolicy(
    timeout=DeadlinePolicy(timeout=3600.0, slow_call_threshold=1800.0),
    retry=RetryPolicy(retry_on="UNAVAILABLE"),
    idempotent=True,
)


class Answer:
    """A call that has ended."""

    def result(self):
        return b""


class Answering(grpc.UnaryUnaryClientInterceptor):
    """Answers in the server's place."""

    def intercept_unary_unary(self, continuation, details, request):
        return Answer()


class AioAnswering(grpc.aio.UnaryUnaryClientInterceptor):
    """Answers in the server's place."""

    async def intercept_unary_unary(self, continuation, details, request):
        return b""


def objects() -> Counter[str]:
    """How many objects there are of each type, of rpcwheel and of Python."""
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


@contextlib.contextmanager
def bounded_objects():
    """Check that no type has gained as many objects as there are names."""
    before = objects()
    yield
    gained = objects() - before
    assert not {kind: count for kind, count in gained.items() if count > MOST}


def test_the_interceptors_keep_a_bounded_number_of_methods():
    with grpc.insecure_channel("127.0.0.1:1") as bare:
        answering = grpc.intercept_channel(bare, Answering())
        channel = grpc.intercept_channel(answering, *sync.client_interceptors(POLICY))
        with bounded_objects():
            for name in NAMES:
                assert channel.unary_unary(name)(b"") == b""


async def test_the_aio_interceptors_keep_a_bounded_number_of_methods():
    chain = [*aio.client_interceptors(POLICY), AioAnswering()]
    async with grpc.aio.insecure_channel("127.0.0.1:1", interceptors=chain) as channel:
        with bounded_objects():
            for name in NAMES:
                assert await channel.unary_unary(name)(b"") == b""


async def test_an_intercepted_aio_channel_keeps_a_bounded_number_of_methods():
    bare = grpc.aio.insecure_channel("127.0.0.1:1", interceptors=[AioAnswering()])
    async with aio.intercept_channel(bare, POLICY) as channel:
        with bounded_objects():
            for name in NAMES:
                assert await channel.unary_unary(name)(b"") == b""
