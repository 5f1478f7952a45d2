"""The multi-callables of a channel of many members, for threads: grpc's four kinds."""

from __future__ import annotations

from rpcwheel._grpc import kinds

from ._pushing import Pushing
from ._tries import Method

__all__ = ["StreamStream", "StreamUnary", "UnaryStream", "UnaryUnary"]


class UnaryUnary(Method, kinds.UnaryUnary):
    """One request, one response."""

    __slots__ = ()


class StreamUnary(Pushing, kinds.StreamUnary):
    """Many requests, one response."""

    __slots__ = ()


class UnaryStream(Method, kinds.UnaryStream):
    """One request, many responses."""

    __slots__ = ()


class StreamStream(Pushing, kinds.StreamStream):
    """Many requests, many responses."""

    __slots__ = ()
