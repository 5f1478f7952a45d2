"""The delivery of a parked call tells the server's status, not one that grpc.aio makes up."""

import pytest

from fixtures.shop import STREAM_STREAM, STREAM_UNARY
from fixtures.waiting import WAIT_S
from rpcwheel.call.aio_call import Delivery
from rpcwheel.rpc import Kind

TRIES = 100
"""One of fourteen streams ended with INTERNAL before `Delivery` asked again."""


@pytest.mark.parametrize(
    ("kind", "method"), [(Kind.STREAM_UNARY, STREAM_UNARY), (Kind.STREAM_STREAM, STREAM_STREAM)]
)
async def test_a_refused_request_stream_fails_as_the_server_said(
    shop, aio_shop_channel, kind, method
):
    async def start(requests, *, timeout, metadata, wait_for_ready):  # noqa: ASYNC109 - the call's
        member = getattr(aio_shop_channel, kind.name.lower())(method)
        return member(requests, timeout=timeout, metadata=metadata, wait_for_ready=wait_for_ready)

    delivery = Delivery(
        method, kind, start, timeout=WAIT_S, metadata=(), wait_for_ready=None, attempts=1
    )
    seen = set()
    for _ in range(TRIES):
        shop.then("UNAVAILABLE")
        with pytest.raises(Exception, match="scripted for") as failed:
            await delivery(b"a", b"b", b"c")
        seen.add(failed.value.code().name)
    assert seen == {"UNAVAILABLE"}
