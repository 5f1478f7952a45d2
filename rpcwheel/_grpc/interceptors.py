"""Lists of interceptors, and which interceptors a channel has.

The asyncio clients of google-cloud append interceptors to four private lists of `grpc.aio.Channel`
after it was made. gRPC reads the lists at each call (1.66 to 1.85), so existing stubs use them too.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import grpc

T = TypeVar("T")

SERVER: Final = "grpc._interceptor"
AIO_SERVER: Final = "grpc.aio._server"
AIO_CHANNEL: Final = "grpc.aio._channel"
READERS: Final = {SERVER, AIO_SERVER, AIO_CHANNEL}
"""The modules of gRPC (1.66 to 1.85) that iterate over interceptors. `grpc.intercept_channel` gets
them one by one, and refuses those of `grpc.aio` itself."""


InterceptorLists: TypeAlias = dict[Kind, list[Any]]
"""The interceptors of a channel of `grpc.aio`, by the kind of call."""

LISTS: Final = {kind: f"_{kind.name.lower()}_interceptors" for kind in Kind}
"""The names of the lists on a channel."""


def lists_of(channel: grpc.aio.Channel) -> InterceptorLists:
    """Return the lists of a channel; an empty dict for a channel of another class without lists."""
    return {kind: getattr(channel, name) for kind, name in LISTS.items() if hasattr(channel, name)}


def give_lists(channel: grpc.aio.Channel, lists: InterceptorLists) -> None:
    """Set the lists of a channel, under the names that gRPC uses."""
    for kind, interceptors in lists.items():
        setattr(channel, LISTS[kind], interceptors)


def interceptors_of(channel: Any) -> Iterator[Any]:
    """Iterate over the interceptors of a channel, without those of channels that it wraps."""
    if hasattr(channel, "_interceptor"):  # made by `grpc.intercept_channel`
        yield channel._interceptor  # noqa: SLF001 - grpcio has no other way
    for interceptors in lists_of(channel).values():
        yield from interceptors


class Interceptors(list[T]):
    """Interceptors for one of gRPC's APIs; the others refuse them when they iterate over the list.

    A `grpc.server` (1.85) accepts any object and then fails each call, and `grpc.aio` does not say
    what to use. In another sequence, the interceptors are refused or fail each call as before.
    """

    def __init__(self, interceptors: Iterable[T], accepted_by: str | None, advice: str) -> None:
        """Make the list.

        Args:
            interceptors: The interceptors.
            accepted_by: The module of gRPC that may iterate over them; None for no module.
            advice: The text of the error.
        """
        super().__init__(interceptors)
        self._accepted_by = accepted_by
        self._advice = advice

    def __iter__(self) -> Iterator[T]:
        module = sys._getframe(1).f_globals.get("__name__")  # noqa: SLF001 - the documented way
        if module in READERS and module != self._accepted_by:
            raise TypeError(self._advice)
        return super().__iter__()
