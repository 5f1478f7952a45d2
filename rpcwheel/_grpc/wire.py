"""The wire format of protobuf, for the few messages that need no generated classes. No I/O."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

VARINT_BYTES: Final = 10
"""The bytes of the longest varint."""


class WireType(enum.IntEnum):
    """How the value of a field is encoded. Groups, which no proto3 message has, are left out."""

    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    """Also text, and a message."""
    FIXED32 = 5


_TYPES: Final = {each.value: each for each in WireType}
_SIZES: Final = {WireType.FIXED64: 8, WireType.FIXED32: 4}


def fields(data: bytes) -> Iterator[tuple[int, WireType, int | bytes]]:
    """Yield the number, the type and the value of each field of a message.

    Raises:
        ValueError: The bytes are not in the wire format, or have a group.
    """
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, wire_type = key >> 3, _TYPES.get(key & 7)
        if wire_type is None:
            raise ValueError(f"the wire type {key & 7}")
        if wire_type is WireType.VARINT:
            value, at = _read_varint(data, at)
            yield number, wire_type, value
            continue
        size = _SIZES.get(wire_type)
        if size is None:
            size, at = _read_varint(data, at)
        if at + size > len(data):
            raise ValueError("a field does not end")
        yield number, wire_type, data[at : at + size]
        at += size


def text_field(number: int, text: str) -> bytes:
    """Return a field with a text."""
    value = text.encode()
    return _varint(number << 3 | WireType.BYTES) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it."""
    value = 0
    for index, byte in enumerate(data[at : at + VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            return value, at + index + 1
    raise ValueError("a number does not end")
