from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Event(_message.Message):
    __slots__ = ["at_unix_ns", "id", "payload", "text"]
    AT_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    at_unix_ns: int
    id: int
    payload: bytes
    text: str
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., payload: _Optional[bytes] = ..., at_unix_ns: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ["id", "server_pid"]
    ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_PID_FIELD_NUMBER: _ClassVar[int]
    id: int
    server_pid: int
    def __init__(self, id: _Optional[int] = ..., server_pid: _Optional[int] = ...) -> None: ...
