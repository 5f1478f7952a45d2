# Written by hand (mypy-protobuf makes such files): just what the examples use.
from collections.abc import Generator

import grpc
from audit_pb2 import Line, Receipt

class _Answer(Receipt):  # the receipt itself on a channel of grpc; to be awaited on one of grpc.aio
    def __await__(self) -> Generator[None, None, Receipt]: ...

class AuditStub:
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ...
    def Push(self, request: Line, timeout: float | None = None) -> _Answer: ...  # noqa: N802

class AuditServicer:
    def Push(self, request: Line, context: grpc.ServicerContext) -> Receipt: ...  # noqa: N802

def add_AuditServicer_to_server(servicer: AuditServicer, server: grpc.Server) -> None: ...  # noqa: N802
