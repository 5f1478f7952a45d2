"""That nothing was sent is sure by the words of a failure, and two of three things more."""

import grpc
import pytest

from fixtures.clusters import instance
from rpcwheel.cluster._aio_unsent import is_unsent, state_of

WORDS = "failed to connect to all addresses; last error: UNKNOWN: {}: connection refused"
OWN, OTHER = "ipv4:127.0.0.1:1", "ipv4:10.0.0.7:1"
OF_V6 = "ipv6:%5B::1%5D:1"


def failure(details, *trailing, code=grpc.StatusCode.UNAVAILABLE):
    # Before grpcio 1.82 no metadata has a default.
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


@pytest.mark.parametrize(
    ("began_in", "state", "address", "sure"),
    [
        ("IDLE", "TRANSIENT_FAILURE", OWN, True),
        ("IDLE", "TRANSIENT_FAILURE", OTHER, True),
        ("IDLE", "READY", OWN, True),
        ("READY", "TRANSIENT_FAILURE", OWN, True),
        ("READY", "TRANSIENT_FAILURE", OTHER, False),
        ("IDLE", "READY", OTHER, False),
        ("READY", "READY", OWN, False),
        ("READY", "CONNECTING", OWN, False),
        ("", "", OWN, False),
    ],
)
def test_two_of_three_make_it_sure(began_in, state, address, sure):
    assert is_unsent(failure(WORDS.format(address)), instance(1), began_in, state) is sure


def test_what_a_host_name_stands_for_is_not_known():
    of_name, words = instance(1, host="localhost"), failure(WORDS.format(OWN))
    assert is_unsent(words, of_name, "IDLE", "TRANSIENT_FAILURE")
    assert not is_unsent(words, of_name, "READY", "TRANSIENT_FAILURE")
    assert not is_unsent(words, of_name, "IDLE", "READY")


def test_ipv6_is_known_too():
    of_v6 = instance(1, host="::1")
    assert is_unsent(failure(WORDS.format(OF_V6)), of_v6, "READY", "TRANSIENT_FAILURE")


@pytest.mark.parametrize(
    "error",
    [
        failure("busy"),
        failure(None),
        failure(WORDS.format(OWN), ("a", "b")),
        failure(WORDS.format(OWN), code=grpc.StatusCode.INTERNAL),
    ],
)
def test_without_the_words_nothing_is_sure(error):
    assert not is_unsent(error, instance(1), "IDLE", "TRANSIENT_FAILURE")


def test_a_state_that_is_hidden_is_none():
    class Hidden:
        def get_state(self):
            raise NotImplementedError

    class Link:
        channel = type("Wire", (), {"channel": Hidden()})

    assert not state_of(Link)
