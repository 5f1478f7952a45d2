import subprocess
import sys

import pytest
from google.protobuf import descriptor_pool

from rpcwheel.registry.providers._etcd_messages import EQUAL, LEASE, messages


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (messages().PutRequest(key=b"k", value=b"v", lease=5), b"\n\1k\x12\1v\x18\5"),
        (
            messages().TxnRequest(
                compare=[messages().Compare(result=EQUAL, target=LEASE, key=b"k", lease=7)]
            ),
            b"\n\7\x10\4\x1a\1k@\7",
        ),
        (messages().WatchRequest(progress=messages().WatchProgressRequest()), b"\x1a\0"),
        (
            messages().WatchRequest(create=messages().WatchCreateRequest(key=b"k", watch_id=2)),
            b"\n\5\n\1k8\2",
        ),
        (messages().LeaseKeepAliveRequest(ID=-1), b"\x08" + b"\xff" * 9 + b"\1"),
    ],
)
def test_on_the_wire_a_message_is_what_etcd_has_numbered(message, wire) -> None:
    assert message.SerializeToString() == wire
    assert type(message).FromString(wire) == message


def test_nothing_stands_in_the_pool_that_all_share() -> None:
    assert messages() is messages()
    for name in ("rpcwheel/etcd.proto", "rpc.proto", "kv.proto"):
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindFileByName(name)


MISSING = """
import sys
sys.modules["google.protobuf"] = None
from rpcwheel.errors import ExtraMissing
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers import open_provider
try:
    open_provider("etcd://10.0.0.1", Settings(15.0, 3.0))
except ExtraMissing as error:
    print(error)
"""


def test_without_protobuf_it_is_said_what_to_install() -> None:
    run = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=100, check=False
    )
    assert "pip install 'rpcwheel[etcd]'" in run.stdout, run.stderr
