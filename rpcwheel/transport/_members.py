"""The multi-callables of a channel for threads: each call finds the connection of the moment.

A call is begun again on the next connection only if grpc refused to begin it, because its
connection was closed at that moment; never after a status.

The calls themselves are grpc's own objects. What was read and written is seen by the functions that
make messages of bytes and bytes of messages; a call is counted from its begin to its end.
"""

from __future__ import annotations

import weakref
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc import multicallable
from rpcwheel._grpc.connectivity import is_bare
from rpcwheel._grpc.finished import FinishedError
from rpcwheel._grpc.styles import call_at_end, failure_of, has_ended, is_single_threaded
from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._switch import AnyLink, Switch

    Convert: TypeAlias = Callable[[Any], Any]

__all__ = ["Ping", "Recipe", "StreamStream", "StreamUnary", "UnaryStream", "UnaryUnary"]


class Recipe:
    """How a multi-callable is made of any link's channel."""

    __slots__ = ("_args", "_deserializer", "_kind", "_method", "_options", "_serializer", "key")

    def __init__(
        self,
        kind: Kind,
        method: str,
        serializer: Convert | None = None,
        deserializer: Convert | None = None,
        args: tuple[Any, ...] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._kind = kind
        self._method = method
        self._serializer = serializer
        self._deserializer = deserializer
        self._args = args
        self._options = options
        self.key: Any = (kind, method, id(serializer), id(deserializer), args, *options.items())

    def __call__(self, link: AnyLink) -> Any:
        """Make it."""
        traffic, serializer = link.traffic, self._serializer
        make = getattr(link.channel, self._kind.name.lower())
        return make(
            self._method,
            traffic.writing(serializer) if self._kind.streams_requests else serializer,
            traffic.reading(self._deserializer),
            *self._args,
            **self._options,
        )


class _Unseen(Recipe):
    """One whose messages are not seen as traffic."""

    __slots__ = ()

    def __init__(self, kind: Kind, method: str) -> None:
        super().__init__(kind, method)
        self.key = "unseen", *self.key

    def __call__(self, link: AnyLink) -> Any:
        return getattr(link.channel, self._kind.name.lower())(self._method)


class _Member:
    """One method of a stub. The base of the four kinds."""

    __slots__ = ("_bound", "_recipe", "_switch")

    def __init__(self, switch: Switch, recipe: Recipe) -> None:
        self._switch = switch
        self._recipe = recipe
        self._bound: tuple[AnyLink | None, Any] = (None, None)

    def _enter(self) -> tuple[AnyLink, Any]:
        """The link for a call that begins now, and grpc's multi-callable there."""
        switch = self._switch
        while True:
            link = switch.enter()
            traffic = link.traffic
            traffic.last_write_ns = traffic.last_use_ns = traffic.now_ns()  # `saw_write`
            bound, call = self._bound  # as one: another thread may change it
            if bound is link:
                return link, call
            try:
                call = switch.make(link, self._recipe.key, self._recipe)
            except BaseException as error:
                switch.leave(link)
                if not self._has_moved(link, error):
                    raise
            else:
                self._bound = link, call
                return link, call

    def _has_moved(self, link: AnyLink, error: BaseException | None) -> bool:
        """Whether nothing was begun on `link`, as another has taken its place meanwhile."""
        closed = isinstance(error, ValueError) and str(error).startswith("Cannot invoke RPC")
        return closed and self._switch.has_moved(link)

    def _wait(self, name: str, request: Any, *options: Any) -> Any:
        """Carry out a call on its caller's thread."""
        switch = self._switch
        link, call = self._enter()
        try:
            return getattr(call, name)(request, *options)
        except grpc.RpcError as error:
            code = getattr(error, "code", None)
            link.traffic.saw_status(code() if callable(code) else None)
            raise
        except ValueError as error:
            if not self._has_moved(link, error):
                raise
            if not is_bare(link.channel):
                raise _ended_on(link) from error
        finally:
            switch.leave(link)
        return self._wait(name, request, *options)

    def _begin(self, name: str, request: Any, *options: Any) -> Any:
        """Begin a call that goes on by itself."""
        switch = self._switch
        link, call = self._enter()
        try:
            running = getattr(call, name)(request, *options)
        except BaseException as error:
            switch.leave(link)
            if not self._has_moved(link, error):
                raise
            if not is_bare(link.channel):
                return _ended_on(link)
            return self._begin(name, request, *options)
        _leave_at_end(running, switch, link)
        # Interceptors on the link's own channel make a call of what is raised below them.
        if link.ended and has_ended(running) and self._has_moved(link, failure_of(running)):
            return _ended_on(link)
        return running


def _ended_on(link: AnyLink) -> FinishedError:
    """How a call ends that interceptors of the connection's own channel ran while it was closed.

    They may have made other calls before, this one among them, so it is not begun again.
    """
    return FinishedError(grpc.StatusCode.UNAVAILABLE, link.details)


def _leave_at_end(call: Any, switch: Switch, link: AnyLink) -> None:
    """Leave `link` when `call` has ended; the call is not kept alive for that."""
    if not is_single_threaded(call):
        call_at_end(call, partial(switch.leave, link))
        return
    # One that is dropped or cancelled tells nobody of its end.
    leave = _Once(partial(switch.leave, link))
    call_at_end(call, leave)
    weakref.finalize(call, _on_a_worker, leave).atexit = False


class _Once:
    """Calls a function, the first time it is called itself."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._functions = [function]

    def __call__(self) -> None:
        functions, self._functions = self._functions, []
        for function in functions:
            function()


def _on_a_worker(job: Callable[[], object]) -> None:
    """The garbage collector's thread may hold any lock."""
    EXECUTOR.submit(job, job)


class UnaryUnary(_Member, multicallable.UnaryUnary):
    """One request, one response."""

    __slots__ = ()


class Ping(UnaryUnary):
    """Heartbeats: bytes in and out; neither use of the connection nor calls in flight."""

    __slots__ = ()

    def __init__(self, switch: Switch, method: str) -> None:
        super().__init__(switch, _Unseen(Kind.UNARY_UNARY, method))

    def _begin(self, name: str, request: Any, *options: Any) -> Any:
        switch, recipe = self._switch, self._recipe
        link = switch.active()
        try:
            call = switch.make(link, recipe.key, recipe)
            return getattr(call, name)(request, *options)
        except ValueError as error:
            if not self._has_moved(link, error):
                raise
        return self._begin(name, request, *options)

    _wait = _begin


class StreamUnary(_Member, multicallable.StreamUnary):
    """Many requests, one response."""

    __slots__ = ()


class UnaryStream(_Member, multicallable.UnaryStream):
    """One request, many responses."""

    __slots__ = ()


class StreamStream(_Member, multicallable.StreamStream):
    """Many requests, many responses."""

    __slots__ = ()
