"""Requests of protobuf as text, without generated classes.

With a descriptor set, fields have their names. Without one, the wire format has their numbers, as
`protoc --decode_raw` prints them; whether a part is a message, text or bytes is a guess.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from rpcwheel._grpc.wire import WireType, fields
from rpcwheel.errors import ConfigurationError, ExtraMissing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_DEPTH: Final = 50
"""Messages within messages; protobuf allows 100."""


def numbered_fields(data: bytes) -> list[str]:
    """Return a line for each field, and one for the end of each inner message.

    Raises:
        ValueError: The bytes are text, or not in the wire format.
    """
    if _text(data) is not None:
        raise ValueError("it is text")
    return list(_lines(data, 0))


def _lines(data: bytes, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for number, wire_type, value in fields(data):
        if not number:
            raise ValueError("0 is no number of a field")
        if isinstance(value, int):
            yield f"{indent}{number}: {value}"
        elif wire_type is WireType.BYTES:
            yield from _described(indent, number, value, depth)
        else:
            yield f"{indent}{number}: 0x{value[::-1].hex()}"


def _described(indent: str, number: int, part: bytes, depth: int) -> Iterator[str]:
    text = _text(part)
    if text is not None:
        yield f"{indent}{number}: {json.dumps(text, ensure_ascii=False)}"
        return
    try:
        lines = list(_lines(part, depth + 1)) if depth < MAX_DEPTH else []
    except ValueError:
        lines = []
    if lines:
        yield from (f"{indent}{number} {{", *lines, f"{indent}}}")
    else:
        yield f"{indent}{number}: {part.hex(' ')}"


def _text(data: bytes) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in "\t\r\n" for char in text) else None


def named_fields(descriptors: Path, method: str, data: bytes) -> list[str]:
    """Return the lines of a request in protobuf's text format.

    Args:
        descriptors: A file that `protoc --include_imports --descriptor_set_out` has written.
        method: The path of the method, such as `/shop.Orders/Push`.
        data: The request.

    Raises:
        ConfigurationError: The file cannot be read, or does not have the method.
        ExtraMissing: protobuf is not installed.
        ValueError: The bytes are no such request.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise ExtraMissing("--descriptors needs the package protobuf") from error
    service, _, name = method.strip("/").rpartition("/")
    pool = descriptor_pool.DescriptorPool()
    try:
        for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes()).file:
            pool.Add(file)
        request = pool.FindServiceByName(service).methods_by_name[name].input_type
    except KeyError:
        raise ConfigurationError(f"{descriptors} does not describe {method}") from None
    except (OSError, DecodeError, TypeError) as error:  # TypeError: an import is missing
        raise ConfigurationError(
            f"{descriptors} is no descriptor set, which `protoc --include_imports "
            f"--descriptor_set_out` writes: {error}"
        ) from error
    try:
        message = message_factory.GetMessageClass(request).FromString(data)
    except DecodeError as error:
        raise ValueError(f"it is no {request.full_name}: {error}") from error
    return text_format.MessageToString(message, as_utf8=True).splitlines()
