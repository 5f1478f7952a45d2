"""The messages of etcd, made at run time."""

import pytest
from google.protobuf import descriptor_pool

from rpcwheel.registry.backends.etcd_client import EQUAL, MOD_REVISION, messages

WIRE = [
    (messages().PutRequest(key=b"k", value=b"v", lease=5), b"\n\1k\x12\1v\x18\5"),
    (
        messages().TxnRequest(
            compare=[
                messages().Compare(result=EQUAL, target=MOD_REVISION, key=b"k", mod_revision=7)
            ]
        ),
        b"\n\7\x10\2\x1a\1k0\7",
    ),
    (messages().WatchRequest(progress=messages().WatchProgressRequest()), b"\x1a\0"),
    (
        messages().WatchRequest(create=messages().WatchCreateRequest(key=b"k", watch_id=2)),
        b"\n\5\n\1k8\2",
    ),
    (messages().LeaseKeepAliveRequest(ID=-1), b"\x08" + b"\xff" * 9 + b"\1"),
]


def test_messages_have_the_field_numbers_of_etcd():
    for message, wire in WIRE:
        assert message.SerializeToString() == wire
        assert type(message).FromString(wire) == message


def test_messages_are_not_in_the_default_descriptor_pool():
    assert messages() is messages()
    for name in ("rpcwheel/etcd.proto", "rpc.proto", "kv.proto"):
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindFileByName(name)
