"""Nonces of attempts, and what is taken from and added to the metadata of a call."""

from dataclasses import replace

import grpc
import pytest

from rpcwheel.call.attempts import with_other_server
from rpcwheel.call.metadata import RETRY_KEY, call_metadata, new_nonce, result_of, with_attempt
from rpcwheel.rpc import CRITICALITY_KEY, NONCE_KEY, REFUSED_KEY, AttemptResult


def test_each_nonce_is_new_and_fits_into_metadata():
    nonces = [new_nonce() for _ in range(1000)]
    assert len(set(nonces)) == 1000
    assert all(nonce.isascii() and len(nonce) < 32 for nonce in nonces)


def test_metadata_without_a_nonce_is_sent_as_it_is():
    for metadata in (None, (), (("a", "b"),), [("a", "b")], grpc.aio.Metadata(("a", "b"))):
        assert call_metadata(metadata, None) is metadata


@pytest.mark.parametrize("kind", [tuple, list, lambda pairs: grpc.aio.Metadata(*pairs)])
def test_the_nonce_of_another_call_is_not_passed_on(kind):
    copied = kind([("a", "b"), (NONCE_KEY, "x"), ("c", "d"), (NONCE_KEY, "y")])
    assert call_metadata(copied, None) == (("a", "b"), ("c", "d"))
    assert call_metadata(copied, "critical") == (
        ("a", "b"),
        ("c", "d"),
        (CRITICALITY_KEY, "critical"),
    )


def test_an_attempt_has_the_nonce_that_it_is_given():
    assert with_attempt(None, 1, "n") == ((NONCE_KEY, "n"),)
    second = with_attempt([("a", "b")], 2, "n")
    assert second[:2] == (("a", "b"), (NONCE_KEY, "n"))
    assert (RETRY_KEY, "1") in second


class Failed(grpc.RpcError):
    def __init__(self, trailing, code=grpc.StatusCode.RESOURCE_EXHAUSTED):
        self._trailing, self._code = trailing, code

    def code(self):
        return self._code

    def trailing_metadata(self):
        return self._trailing


@pytest.mark.parametrize(
    ("values", "nonce", "refused", "is_proven"),
    [
        ([], "n", False, False),
        ([], None, False, False),
        (["n"], "n", True, True),
        (["m"], "n", True, False),
        ([""], "n", True, False),
        ([""], None, True, False),
        (["n"], None, True, False),
        (["n", "n"], "n", True, False),
        (["m", "n"], "n", True, False),
        ([b"n"], "n", True, False),
        (["None"], None, True, False),
    ],
)
@pytest.mark.parametrize("kind", [list, lambda pairs: grpc.aio.Metadata(*pairs)])
def test_a_refusal_is_proven_by_the_one_nonce_of_its_attempt(
    values, nonce, refused, is_proven, kind
):
    trailing = kind([("a", "n"), *((REFUSED_KEY, value) for value in values)])
    result = result_of(Failed(trailing), nonce=nonce)
    assert (result.refused, result.is_proven) == (refused, is_proven)


def test_a_refusal_has_one_of_two_codes():
    trailing = [(REFUSED_KEY, "n")]
    refusals = {
        code.name
        for code in grpc.StatusCode
        if result_of(Failed(trailing, code), nonce="n").is_proven
    }
    assert refusals == {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
    error = Failed(trailing, grpc.StatusCode.INTERNAL)
    assert result_of(error, nonce="n") == AttemptResult("INTERNAL", error)
    bare = Failed(None)
    assert result_of(bare, nonce="n") == AttemptResult("RESOURCE_EXHAUSTED", bare)


class Server:
    """A subchannel of a channel with these servers that are READY."""

    def __init__(self, ready):
        self.ready = ready
        ready.append(self)

    def has_other(self, tried):
        return any(server not in tried for server in self.ready)


def test_a_refused_call_has_another_server_until_all_were_tried():
    ready, tried = [], []
    one, other = Server(ready), Server(ready)
    refused = AttemptResult("RESOURCE_EXHAUSTED", refused=True)
    elsewhere = replace(refused, has_other_server=True)
    assert with_other_server(refused, None, tried) == refused
    assert with_other_server(refused, one, tried) == elsewhere
    assert with_other_server(refused, one, tried) == elsewhere
    assert tried == [one]
    assert with_other_server(refused, other, tried) == refused
    assert with_other_server(refused, one, tried) == elsewhere  # after the pushback
