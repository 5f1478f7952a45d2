"""Bases of classes whose objects are closed at the end of a `with` block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Closing:
    """A context manager that closes itself by `close`, which the subclass defines."""

    close: Callable[..., object]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClosing:
    """An async context manager that closes itself by `close`, which the subclass defines.

    `close` may be a coroutine function, or not.
    """

    close: Callable[..., Awaitable[object] | None]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if (closing := self.close()) is not None:
            await closing
