"""The bytes of stored calls, and idempotency and order keys."""

import contextlib
import json
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.call.idempotency import (
    IDEMPOTENCY_KEY,
    checked_order_key,
    idempotency_key,
    key_of,
    new_key,
    with_idempotency_key,
    with_key,
)
from rpcwheel.failback.stored import StoredFunction, StoredRpc, decode
from rpcwheel.rpc import Kind

TEXT = st.text(st.characters(codec="ascii", min_codepoint=0x20))
METADATA = st.tuples(TEXT, TEXT) | st.tuples(TEXT.map("{}-bin".format), st.binary())
RPC = StoredRpc(
    *(Kind.STREAM_UNARY, (b"one", b"", b"three"), (("k", "v"), ("k-bin", b"\xff")), 2.5, True),
    retry_on=frozenset({"ABORTED", "UNAVAILABLE"}),
)


def with_header(**changes):
    """The bytes of `RPC` with a changed header; a key whose value is None is left out."""
    body = RPC.encoded()
    (size,) = struct.unpack_from(">I", body, 1)
    header = json.loads(body[5 : 5 + size]) | changes
    text = json.dumps({key: value for key, value in header.items() if value is not None}).encode()
    return struct.pack(">BI", 1, len(text)) + text + body[5 + size :]


@given(
    st.builds(
        StoredRpc,
        st.sampled_from([Kind.STREAM_UNARY, Kind.STREAM_STREAM]),
        st.lists(st.binary()).map(tuple),
        st.lists(METADATA).map(tuple),
        st.floats(min_value=0.001, max_value=1e9),
        st.none() | st.booleans(),
    )
    | st.builds(StoredRpc, st.just(Kind.UNARY_STREAM), st.tuples(st.binary()))
    | st.builds(StoredFunction, st.binary())
)
def test_a_call_is_decoded_as_it_was_encoded(call):
    assert decode(call.encoded()) == call


@pytest.mark.parametrize("call", [RPC, StoredFunction(b"{}")])
def test_damaged_bytes_raise_value_error_at_every_position(call):
    body = call.encoded()
    for position in range(len(body)):
        for damaged in {0, 1, 0x22, 0x2D, 0x39, 0x5B, 0x7B, 0xFF, body[position] ^ 1}:
            changed = bytearray(body)
            changed[position] = damaged
            with contextlib.suppress(ValueError):  # any other error fails the test
                decode(bytes(changed))


def test_cut_bytes_raise_value_error_at_every_position():
    body = RPC.encoded()
    for length in range(len(body)):
        with pytest.raises(ValueError, match="its bytes are damaged: "):
            decode(body[:length])


@given(st.binary())
def test_random_bytes_raise_value_error(body):
    for header in (b"", struct.pack(">BI", 1, len(body)), struct.pack(">BI", 1, len(body) // 2)):
        with pytest.raises(ValueError, match=r"its bytes are damaged|format"):
            decode(header + body)


def test_a_newer_format_is_named_with_what_to_do():
    with pytest.raises(ValueError, match="stored in format 2, and this rpcwheel reads format 1: d"):
        decode(b"\x02" + RPC.encoded()[1:])


def test_unknown_header_keys_of_a_later_version_are_ignored():
    assert decode(with_header(compression="gzip")) == RPC


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "unary_unary"}, "it has 3 requests"),
        ({"kind": "unary"}, "KeyError"),
        ({"kind": 5}, "AttributeError"),
        ({"kind": None}, "KeyError"),
        ({"sizes": [3, 0, 4]}, "its requests are incomplete"),
        ({"sizes": [3, 0, 6]}, "its requests are incomplete"),
        ({"sizes": [9, -1, 0]}, "its requests are incomplete"),
        ({"sizes": [9, -1]}, "its requests are incomplete"),
        ({"sizes": [3.0, 0, 5]}, "TypeError"),
        ({"sizes": 3}, "TypeError"),
        ({"timeout": 0}, "its timeout is 0"),
        ({"timeout": -1}, "its timeout is -1"),
        ({"timeout": float("inf")}, "its timeout is inf"),
        ({"timeout": float("nan")}, "its timeout is nan"),
        ({"metadata": [["k"]]}, "ValueError"),
        ({"metadata": [["k", []]]}, "IndexError"),
        ({"metadata": [["k", {}]]}, "KeyError"),
        ({"metadata": [["k", ["?"]]]}, "Error"),
    ],
)
def test_a_damaged_header_is_described(changes, message):
    with pytest.raises(ValueError, match=f"its bytes are damaged: .*{re.escape(message)}"):
        decode(with_header(**changes))


def test_a_header_that_is_nested_too_deep_raises_value_error():
    text = b"[" * 100_000
    with pytest.raises(ValueError, match="RecursionError"):
        decode(struct.pack(">BI", 1, len(text)) + text)


def test_no_repr_contains_requests_or_metadata():
    assert "three" not in repr(RPC)
    assert "k-bin" not in repr(RPC)
    assert "secret" not in repr(StoredFunction(b"secret"))


# --- Keys ---


def test_idempotency_keys_differ_and_increase_with_time():
    keys = [new_key() for _ in range(100)]
    assert len(set(keys)) == 100
    times = [key[:12] for key in keys]
    assert times == sorted(times)
    assert all(re.fullmatch("[0-9a-f]{32}", key) for key in keys)


def test_metadata_gets_a_key_unless_it_has_one():
    assert with_key([("k", "v"), (IDEMPOTENCY_KEY, "mine")]) == (
        ("k", "v"),
        (IDEMPOTENCY_KEY, "mine"),
    )
    first, (name, key) = with_key([("k", "v")])
    assert (first, name) == (("k", "v"), IDEMPOTENCY_KEY)
    assert key_of(with_key(None)) != key
    assert with_key([("Idempotency-Key", "mine")]) == (("Idempotency-Key", "mine"),)
    for name in (IDEMPOTENCY_KEY, "Idempotency-Key"):
        ((_, key),) = with_key([(name, "")])
        assert len(key) == 32


def test_key_of_metadata():
    assert key_of(None) is key_of([("k", "v")]) is None
    assert key_of([("k", "v"), (IDEMPOTENCY_KEY, b"mine")]) == "mine"


def test_the_key_in_the_context_ends_with_the_block():
    with with_idempotency_key("outer"):
        with with_idempotency_key("inner"):
            assert idempotency_key() == "inner"
        assert idempotency_key() == "outer"
    assert idempotency_key() is None


def test_an_order_key_is_a_string_an_integer_or_none():
    assert [checked_order_key(key) for key in ("shop", 7, None, "")] == ["shop", "7", None, ""]
    for key in (True, 1.5, b"shop", ("shop",)):
        with pytest.raises(TypeError, match="order_key must give a str, an int or None, not "):
            checked_order_key(key)
    for key in ("a\0b", "\udcff"):
        with pytest.raises(ValueError, match=r"NUL|surrogates"):
            checked_order_key(key)
