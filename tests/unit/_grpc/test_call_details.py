"""Call details and metadata in the forms that gRPC, its users and other interceptors give."""

from typing import NamedTuple

import grpc
import pytest

from fixtures.shop import UNARY_UNARY
from rpcwheel._grpc.calls import Details, details_of, metadata_tuple
from rpcwheel.call.metadata import ATTEMPTS_KEY, RETRY_KEY, with_attempt

GIVEN = {
    "method": "/test.Shop/UnaryUnary",
    "timeout": 2.5,
    "metadata": (("a", "1"),),
    "credentials": grpc.access_token_call_credentials("token"),
    "wait_for_ready": True,
    "compression": grpc.Compression.Gzip,
}


class Foreign(grpc.ClientCallDetails):
    """As other interceptors define them."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Shuffled(NamedTuple):
    timeout: float
    method: str
    more: str


@pytest.mark.parametrize(
    ("details", "copied"),
    [
        (Foreign(**GIVEN), tuple(GIVEN.values())),
        (Details(**GIVEN), tuple(GIVEN.values())),
        (Foreign(method="/a/B"), ("/a/B", None, None, None, None, None)),
        (Shuffled(1.5, "/a/B", "x"), ("/a/B", 1.5, None, None, None, None)),
    ],
)
def test_details_of_any_class_have_the_fields_of_grpcs(details, copied):
    made = details_of(details)
    assert isinstance(made, grpc.ClientCallDetails)
    assert made == copied
    assert made._replace(timeout=1.0) == Details(*copied)._replace(timeout=1.0)
    assert made.timeout == copied[1]


def test_details_have_the_fields_of_the_installed_grpcio(shop_channel):
    """A field that a new grpcio adds would be lost in `details_of`."""
    seen = []

    class Look(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            seen.append(details)
            return continuation(details_of(details), request)

    channel = grpc.intercept_channel(shop_channel, Look())
    given = {name: GIVEN[name] for name in ("timeout", "metadata", "wait_for_ready", "compression")}
    assert channel.unary_unary(UNARY_UNARY)(b"order", **given) == b"order"
    assert seen[0]._fields == Details._fields
    assert details_of(seen[0])._asdict() == GIVEN | {"credentials": None}


PAIRS = [("a", "1"), ("b-bin", b"2"), ("a", "3")]


@pytest.mark.parametrize(
    "given", [PAIRS, tuple(PAIRS), grpc.aio.Metadata(*PAIRS), iter(PAIRS), [*map(list, PAIRS)]]
)
def test_metadata_of_any_form_becomes_a_tuple_of_pairs(given):
    assert sorted(metadata_tuple(given)) == sorted(PAIRS)
    for nothing in (None, (), [], grpc.aio.Metadata()):
        assert metadata_tuple(nothing) == with_attempt(nothing, 1) == ()


def test_attempts_after_the_first_carry_the_number_of_previous_attempts():
    given = [("a", "1")]
    assert with_attempt(given, 1) == (("a", "1"),)
    assert with_attempt(given, 2) == (("a", "1"), (ATTEMPTS_KEY, "1"), (RETRY_KEY, "1"))
    assert with_attempt(None, 5) == ((ATTEMPTS_KEY, "4"), (RETRY_KEY, "4"))
    assert given == [("a", "1")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [([("grpc.enable_retries", 0)], ("2", "2")), ([], (None, "2"))],
    ids=["without gRPC's own retries", "by default"],
)
async def test_the_server_gets_x_retry_attempt_also_if_grpc_removes_its_own_header(
    shop, options, expected
):
    with grpc.insecure_channel(shop.target, options) as channel:
        channel.unary_unary(UNARY_UNARY)(b"order", metadata=with_attempt(None, 3))
        channel.unary_unary(UNARY_UNARY)(b"order", metadata=with_attempt(None, 1))
    async with grpc.aio.insecure_channel(shop.target, options) as channel:
        await channel.unary_unary(UNARY_UNARY)(b"order", metadata=with_attempt(None, 3))
    retry, first, of_aio = (
        tuple(map(seen.metadata.get, ("grpc-previous-rpc-attempts", "x-retry-attempt")))
        for seen in shop.calls
    )
    assert retry == of_aio == expected
    assert first == (None, None)


def test_a_number_in_the_callers_metadata_is_replaced_from_the_second_attempt_on():
    """A server may pass on the metadata of the call that it serves."""
    given = with_attempt([("a", "1")], 7)
    assert with_attempt(given, 2) == with_attempt([("a", "1")], 2)
    assert with_attempt(given, 1) == given
