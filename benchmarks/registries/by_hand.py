"""The rival to a channel by name with nothing in it: a bare channel each, called in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import cycle
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio


class _InTurn:
    """Unary calls, each on the next channel. One function more than a bare channel needs."""

    def __init__(self, channels: Sequence[Any]) -> None:
        self._channels = channels

    def unary_unary(self, method: str) -> Callable[..., Any]:
        """Make a member of a stub."""
        following = cycle([channel.unary_unary(method) for channel in self._channels]).__next__

        def call(request: bytes, *, timeout: float | None = None) -> Any:
            return following()(request, timeout=timeout)

        return call


class InTurn(_InTurn):
    """Some channels of grpc."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        super().__init__(channels)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for channel in self._channels:
            self._stack.enter_context(channel)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self._stack.close()


class AioInTurn(_InTurn):
    """Some channels of grpc.aio."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        super().__init__(channels)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for channel in self._channels:
            await self._stack.enter_async_context(channel)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self._stack.aclose()
