"""What is said to etcd: the messages of its API v3 that are needed here, and of those the fields.

They stand in a descriptor pool of their own. Other clients of etcd register `rpc.proto` and
`kv.proto` in the pool that all share, where a file of that name, the user's or a second client's,
makes an import fail. Numbers and names are those of etcd's `rpc.proto`, 3.4 to 3.6.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.errors import ExtraMissing

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["EQUAL", "LEASE", "MOD_REVISION", "messages"]

EQUAL: Final = 0
"""`Compare.result`."""

MOD_REVISION: Final = 2
LEASE: Final = 4
"""`Compare.target`."""

SCHEMA: Final = """
ResponseHeader         cluster_id:1:u member_id:2:u revision:3:i raft_term:4:u
KeyValue               key:1:b create_revision:2:i mod_revision:3:i version:4:i value:5:b lease:6:i
Event                  type:1:e kv:2:KeyValue
RangeRequest           key:1:b range_end:2:b limit:3:i revision:4:i keys_only:8:t count_only:9:t
RangeResponse          header:1:ResponseHeader kvs:2:*KeyValue more:3:t count:4:i
PutRequest             key:1:b value:2:b lease:3:i
PutResponse            header:1:ResponseHeader
DeleteRangeRequest     key:1:b range_end:2:b
DeleteRangeResponse    header:1:ResponseHeader deleted:2:i
Compare                result:1:e target:2:e key:3:b mod_revision:6:i lease:8:i
RequestOp              range:1:RangeRequest put:2:PutRequest delete_range:3:DeleteRangeRequest
ResponseOp             range:1:RangeResponse put:2:PutResponse delete_range:3:DeleteRangeResponse
TxnRequest             compare:1:*Compare success:2:*RequestOp failure:3:*RequestOp
TxnResponse            header:1:ResponseHeader succeeded:2:t responses:3:*ResponseOp
LeaseGrantRequest      TTL:1:i ID:2:i
LeaseGrantResponse     header:1:ResponseHeader ID:2:i TTL:3:i error:4:s
LeaseRevokeRequest     ID:1:i
LeaseRevokeResponse    header:1:ResponseHeader
LeaseKeepAliveRequest  ID:1:i
LeaseKeepAliveResponse header:1:ResponseHeader ID:2:i TTL:3:i
AuthenticateRequest    name:1:s password:2:s
AuthenticateResponse   header:1:ResponseHeader token:2:s
WatchCreateRequest     key:1:b range_end:2:b start_revision:3:i watch_id:7:i
WatchCancelRequest     watch_id:1:i
WatchProgressRequest
WatchRequest           create:1:WatchCreateRequest cancel:2:WatchCancelRequest \
progress:3:WatchProgressRequest
WatchResponse          header:1:ResponseHeader watch_id:2:i created:3:t canceled:4:t \
compact_revision:5:i cancel_reason:6:s events:11:*Event
"""
"""A message in each line, its fields as `name:number:type`. Types: i int64, u uint64, e int32 (an
enum), t bool, b bytes, s string, or a message; `*` before it: repeated. Where etcd has a `oneof`,
one of the fields is set: on the wire that is the same."""

PACKAGE: Final = "rpcwheel.etcd"


@functools.cache
def messages() -> SimpleNamespace:
    """Make the classes, by name; the same ones for the whole process.

    Raises:
        ExtraMissing: protobuf is not installed.
    """
    try:
        from google.protobuf import (
            descriptor_pb2,
            descriptor_pool,
            message_factory,
        )
    except ImportError as error:
        raise ExtraMissing(
            "etcd:// needs the package protobuf: pip install 'rpcwheel[etcd]'"
        ) from error
    file = descriptor_pb2.FileDescriptorProto(
        name="rpcwheel/etcd.proto", package=PACKAGE, syntax="proto3"
    )
    for line in SCHEMA.strip().splitlines():
        name, *fields = line.split()
        made = file.message_type.add(name=name)
        for field in fields:
            made.field.append(_field(descriptor_pb2, *field.split(":")))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    names = [message.name for message in file.message_type]
    found = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in names}
    return SimpleNamespace(
        **{name: message_factory.GetMessageClass(each) for name, each in found.items()}
    )


def _field(proto: ModuleType, name: str, number: str, kind: str) -> Any:
    kinds = proto.FieldDescriptorProto
    types = {
        "i": kinds.TYPE_INT64,
        "u": kinds.TYPE_UINT64,
        "e": kinds.TYPE_INT32,
        "t": kinds.TYPE_BOOL,
        "b": kinds.TYPE_BYTES,
        "s": kinds.TYPE_STRING,
    }
    bare = kind.removeprefix("*")
    label = kinds.LABEL_REPEATED if kind != bare else kinds.LABEL_OPTIONAL
    if bare in types:
        return kinds(name=name, number=int(number), label=label, type=types[bare])
    where = f".{PACKAGE}.{bare}"
    return kinds(
        name=name, number=int(number), label=label, type=kinds.TYPE_MESSAGE, type_name=where
    )
