"""What is known of the connection below a channel or a continuation, and the end of its calls."""

import asyncio
import contextlib
from functools import partial

import grpc
import pytest

from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._grpc.connectivity import (
    core_below,
    end_calls,
    is_cut_off,
    is_polled,
    state_below,
    wait_unpolled,
)


class Look(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Notes what is known of the channel when a call has ended."""

    def __init__(self) -> None:
        self.saw = []

    def intercept_unary_unary(self, continuation, details, request):
        call = continuation(details, request)
        with contextlib.suppress(grpc.RpcError):
            call.code()
        self.saw.append(is_cut_off(continuation))
        return call

    intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = (
        intercept_unary_unary
    )


class AioLook(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self) -> None:
        self.saw = []

    async def intercept_unary_unary(self, continuation, details, request):
        call = await continuation(details, request)
        await call.code()
        self.saw.append(is_cut_off(continuation))
        return call


def call_all(channel):
    for call in (
        lambda: channel.unary_unary(UNARY_UNARY)(b"x", timeout=10),
        lambda: channel.unary_unary(UNARY_UNARY).future(b"x", timeout=10).result(),
        lambda: list(channel.unary_stream(UNARY_STREAM)(b"x", timeout=10)),
        lambda: channel.stream_unary(STREAM_UNARY)(iter([b"x"]), timeout=10),
        lambda: list(channel.stream_stream(STREAM_STREAM)(iter([b"x"]), timeout=10)),
    ):
        with contextlib.suppress(grpc.RpcError):
            call()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_channel_that_never_connected_is_cut_off(depth):
    looks = [Look() for _ in range(depth)]
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call_all(grpc.intercept_channel(channel, *looks))
    assert [look.saw for look in looks] == [[True] * 5] * depth


def test_a_channel_intercepted_twice_is_found(shop):
    look = Look()
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call_all(grpc.intercept_channel(grpc.intercept_channel(channel, Look()), look))
    assert look.saw == [True] * 5


def test_a_server_that_answers_so_itself_does_not_cut_it_off(shop, shop_channel):
    look = Look()
    shop.then(*["UNAVAILABLE"] * 5)
    call_all(grpc.intercept_channel(shop_channel, look))
    assert look.saw == [False] * 5


async def test_a_channel_of_aio_is_found_too(shop):
    look = AioLook()
    async with grpc.aio.insecure_channel("127.0.0.1:1", interceptors=[look]) as channel:
        with contextlib.suppress(grpc.RpcError):
            await channel.unary_unary(UNARY_UNARY)(b"x", timeout=10)
    shop.then("UNAVAILABLE")
    async with grpc.aio.insecure_channel(shop.target, interceptors=[look]) as channel:
        with contextlib.suppress(grpc.RpcError):
            await channel.unary_unary(UNARY_UNARY)(b"x", timeout=10)
    assert look.saw == [True, False]


@pytest.mark.parametrize("continuation", [None, print, lambda: None, asyncio.sleep, object()])
def test_of_what_is_not_grpcios_nothing_is_known(continuation):
    assert is_cut_off(continuation) is False


def test_a_channel_on_the_way_that_knows_it_better_is_asked(shop_channel):
    class Knows:
        answers = [True, False]  # noqa: RUF012

        def __init__(self, channel) -> None:
            self._channel = channel

        def __getattr__(self, name):
            return getattr(self._channel, name)

        def is_cut_off(self):
            return self.answers.pop(0)

    look = Look()
    call = grpc.intercept_channel(Knows(shop_channel), look).unary_unary(UNARY_UNARY)
    for _ in range(3):  # the third time it raises
        call(b"x")
    assert look.saw == [True, False, False]


# A channel


class Through(Look):
    """An interceptor that waits for nothing."""

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)

    intercept_unary_stream = intercept_unary_unary


def intercepted(channel):
    return grpc.intercept_channel(channel, Through(), Through())


@pytest.mark.parametrize("wrap", [lambda channel: channel, intercepted])
def test_the_state_of_a_channel_is_found_below_its_interceptors(shop, wrap):
    with grpc.insecure_channel(shop.target) as channel:
        assert state_below(wrap(channel)) is grpc.ChannelConnectivity.IDLE
        assert state_below(wrap(channel), try_to_connect=True) is grpc.ChannelConnectivity.IDLE
        assert wait_until(lambda: state_below(wrap(channel)) is grpc.ChannelConnectivity.READY)
    assert state_below(wrap(channel)) is grpc.ChannelConnectivity.SHUTDOWN


def test_the_states_are_in_the_order_of_grpcs_core(shop):
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        state_below(channel, try_to_connect=True)
        failing = grpc.ChannelConnectivity.TRANSIENT_FAILURE
        assert wait_until(lambda: state_below(channel) is failing)


@pytest.mark.parametrize("other", [None, object(), grpc])
def test_of_a_channel_of_another_make_nothing_is_known(other):
    assert (core_below(other), state_below(other), is_polled(other)) == (None, None, False)


def test_a_channel_is_polled_while_somebody_subscribes_and_a_little_longer(shop_channel):
    told = []
    channel = intercepted(shop_channel)
    assert not is_polled(channel)
    channel.subscribe(told.append)
    assert is_polled(channel)
    channel.unsubscribe(told.append)
    assert wait_until(lambda: not is_polled(channel))


def test_who_waits_until_no_channel_is_polled_waits_for_all(shop_channel):
    told = []
    with grpc.insecure_channel("127.0.0.1:1") as other:
        for channel in (shop_channel, other):
            channel.subscribe(told.append)
            channel.unsubscribe(told.append)
        wait_unpolled(shop_channel, object(), intercepted(other))
        assert (is_polled(shop_channel), is_polled(other)) == (False, False)
    wait_unpolled()


def test_who_waits_for_a_channel_that_stays_polled_gives_up(shop_channel):
    told = []
    shop_channel.subscribe(told.append)
    wait_unpolled(shop_channel)
    assert is_polled(shop_channel)
    shop_channel.unsubscribe(told.append)
    wait_unpolled(shop_channel)


@pytest.mark.parametrize("wrap", [lambda channel: channel, intercepted])
def test_all_calls_of_a_channel_end_with_the_words_they_are_given(shop, wrap):
    hang, silent = Hang(), Silent(after=1)
    channel = wrap(grpc.insecure_channel(shop.target))
    shop.then(hang)
    future = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert hang.begun.wait(WAIT_S)
    shop.then(silent)
    stream = channel.unary_stream(UNARY_STREAM)(b"x")
    assert next(stream) == b"x"
    assert silent.begun.wait(WAIT_S)
    end_calls(channel, "no more")
    end_calls(channel, "again")
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    for error in future.exception(), caught.value:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() in {"no more", "Stream removed (no more)"}  # as grpc's core likes it
    with pytest.raises(ValueError, match="closed channel"):
        channel.unary_unary(UNARY_UNARY).with_call(b"x")[0]


def test_details_that_are_no_text_end_the_calls_too(shop):
    hang = Hang()
    channel = grpc.insecure_channel(shop.target)
    shop.then(hang)
    future = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert hang.begun.wait(WAIT_S)
    end_calls(channel, "no \udc80 more")
    assert future.exception().details() == "no \\udc80 more"


def test_a_continuation_of_an_older_grpc_aio_shows_its_call_too():
    class Call:
        """As of grpc.aio before 1.83: what makes the call is a function in a method."""

        def is_cut_off(self):
            return True

        def continuation(self):
            return partial(lambda _: self, ())

    assert is_cut_off(Call().continuation())
