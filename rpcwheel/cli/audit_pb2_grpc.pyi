# Written by hand: grpcio-tools makes no types for this file. Only what rpcwheel.cli uses.
import grpc

from rpcwheel.cli.audit_pb2 import Event, Receipt

class _Push:
    def __call__(self, request: Event, timeout: float | None = None) -> Receipt: ...

class AuditStub:
    Push: _Push
    def __init__(self, channel: grpc.Channel) -> None: ...
