"""What the caller gives with a call reaches every try of it unchanged."""

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_STREAM, UNARY_UNARY
from fixtures.waiting import WAIT_S
from rpcwheel.interceptors import CallPolicy, aio, intercept_channel

POLICY = CallPolicy(
    timeout=WAIT_S, idempotent=True, retry={"on": "UNAVAILABLE", "attempts": 3, "wait": 0.0}
)
TOKEN = grpc.access_token_call_credentials("token")


class Note(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Stands inside, and keeps what each try is made with."""

    def __init__(self) -> None:
        self.saw = []

    def intercept_unary_unary(self, continuation, details, request):
        self.saw.append((details.wait_for_ready, details.compression, details.credentials))
        return continuation(details._replace(credentials=None), request)  # no TLS here

    intercept_unary_stream = intercept_unary_unary


class AioNote(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self) -> None:
        self.saw = []

    async def intercept_unary_unary(self, continuation, details, request):
        self.saw.append(details.wait_for_ready)
        return await continuation(details, request)


@pytest.mark.parametrize("kind", ["blocking", "future", "stream"])
def test_each_try_is_made_with_what_the_caller_gave(kind, shop, shop_channel):
    note = Note()
    channel = intercept_channel(grpc.intercept_channel(shop_channel, note), POLICY)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    given = {
        "wait_for_ready": True,
        "compression": grpc.Compression.Gzip,
        "credentials": TOKEN,
        "metadata": (("k", "v"),),
    }
    match kind:
        case "blocking":
            channel.unary_unary(UNARY_UNARY)(b"x", **given)
        case "future":
            channel.unary_unary(UNARY_UNARY).future(b"x", **given).result(20)
        case "stream":
            list(channel.unary_stream(UNARY_STREAM)(b"x", **given))
    assert note.saw == [(True, grpc.Compression.Gzip, TOKEN)] * 3
    assert [seen.metadata["k"] for seen in shop.calls] == ["v"] * 3


@pytest.mark.parametrize("own_channel", [False, True])
async def test_each_try_of_aio_is_made_with_what_the_caller_gave(own_channel, shop):
    note = AioNote()
    ours = [] if own_channel else aio.client_interceptors(POLICY)
    async with grpc.aio.insecure_channel(
        shop.target, options=IMPATIENT, interceptors=[*ours, note]
    ) as channel:
        called = aio.intercept_channel(channel, POLICY) if own_channel else channel
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        call = called.unary_unary(UNARY_UNARY)(
            b"x", wait_for_ready=True, compression=grpc.Compression.Gzip, metadata=(("k", "v"),)
        )
        assert await call == b"x"
    assert note.saw == [True] * 3
    assert [seen.metadata["k"] for seen in shop.calls] == ["v"] * 3


def test_a_call_that_waits_for_its_server_is_not_retried_but_waits(shop, shop_channel):
    shop.kill()
    note = Note()
    channel = intercept_channel(grpc.intercept_channel(shop_channel, note), POLICY)
    future = channel.unary_unary(UNARY_UNARY).future(b"x", wait_for_ready=True)
    with pytest.raises(grpc.FutureTimeoutError):
        future.result(0.3)
    shop.start()
    assert future.result(20) == b"x"
    assert len(note.saw) == 1
