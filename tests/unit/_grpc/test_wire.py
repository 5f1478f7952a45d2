"""Protobuf's wire format: each type of a field, and what is refused."""

import struct

import pytest

from rpcwheel._grpc.wire import WireType, fields, text_field

PARTS = (
    b"\x08\xac\x02",  # field 1: 300
    b"\x11" + struct.pack("<d", 1.5),  # field 2
    b"\x1a\x03abc",  # field 3
    b"\x25" + struct.pack("<f", 2.5),  # field 4
)
MESSAGE = b"".join(PARTS)
ENDS = (0, 3, 12, 17, 22)
"""Where a message can end: with none of the fields, one of them, and so on."""


def test_each_field_has_its_number_its_type_and_its_value():
    assert list(fields(MESSAGE)) == [
        (1, WireType.VARINT, 300),
        (2, WireType.FIXED64, struct.pack("<d", 1.5)),
        (3, WireType.BYTES, b"abc"),
        (4, WireType.FIXED32, struct.pack("<f", 2.5)),
    ]


def test_a_message_that_ends_within_a_field_is_refused():
    for end in range(len(MESSAGE) + 1):
        if end in ENDS:
            assert len(list(fields(MESSAGE[:end]))) == ENDS.index(end)
        else:
            with pytest.raises(ValueError, match="does not end"):
                list(fields(MESSAGE[:end]))


@pytest.mark.parametrize("wire_type", [3, 4, 6, 7])
def test_other_wire_types_are_refused_by_their_number(wire_type):
    with pytest.raises(ValueError, match=f"^the wire type {wire_type}$"):
        list(fields(bytes([1 << 3 | wire_type])))


def test_a_number_has_ten_bytes_at_most():
    assert list(fields(b"\x08" + b"\xff" * 9 + b"\x01")) == [(1, WireType.VARINT, 2**64 - 1)]
    with pytest.raises(ValueError, match="a number does not end"):
        list(fields(b"\x08" + b"\xff" * 10 + b"\x01"))


@pytest.mark.parametrize("length", [0, 1, 127, 128, 20_000])
def test_the_field_of_a_text_is_read_again(length):
    assert list(fields(text_field(20, "x" * length))) == [(20, WireType.BYTES, b"x" * length)]
