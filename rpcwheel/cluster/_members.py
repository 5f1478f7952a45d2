"""The multi-callables of a channel of many members, for threads: grpc's four kinds."""

from __future__ import annotations

from rpcwheel._grpc import multicallable

from ._pushing import Pushing
from ._tries import Method

__all__ = ["StreamStream", "StreamUnary", "UnaryStream", "UnaryUnary"]


class UnaryUnary(Method, multicallable.UnaryUnary):
    """One request, one response."""

    __slots__ = ()


class StreamUnary(Pushing, multicallable.StreamUnary):
    """Many requests, one response."""

    __slots__ = ()


class UnaryStream(Method, multicallable.UnaryStream):
    """One request, many responses."""

    __slots__ = ()


class StreamStream(Pushing, multicallable.StreamStream):
    """Many requests, many responses."""

    __slots__ = ()
