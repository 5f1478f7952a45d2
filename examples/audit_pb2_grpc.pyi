# Written by hand (mypy-protobuf makes such files): just what the examples use.
from collections.abc import Awaitable, Generator, Iterator
from typing import Any

import grpc
from audit_pb2 import Line, Receipt

class _Answer(Receipt):  # the receipt itself on a channel of grpc; to be awaited on one of grpc.aio
    def __await__(self) -> Generator[None, None, Receipt]: ...
    async def trailing_metadata(self) -> Any: ...

class _Push:
    def __call__(
        self, request: Line, timeout: float | None = None, *, wait_for_ready: bool | None = None
    ) -> _Answer: ...
    def with_call(
        self, request: Line, timeout: float | None = None, *, wait_for_ready: bool | None = None
    ) -> tuple[Receipt, Any]: ...
    def future(self, request: Line, timeout: float | None = None) -> Any: ...

class _Lines(grpc.Call, Iterator[Line]):
    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str: ...

class AuditStub:
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ...
    Push: _Push
    def Follow(self, request: Line, timeout: float | None = None) -> _Lines: ...  # noqa: N802

class AuditServicer:  # `context` is grpc's, or grpc.aio's
    def Push(self, request: Line, context: Any) -> Receipt | Awaitable[Receipt]: ...  # noqa: N802
    def Follow(self, request: Line, context: Any) -> Iterator[Line]: ...  # noqa: N802

def add_AuditServicer_to_server(  # noqa: N802
    servicer: AuditServicer, server: grpc.Server | grpc.aio.Server
) -> None: ...
