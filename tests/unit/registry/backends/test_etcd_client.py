"""The etcd client without an etcd."""

import weakref
from contextlib import closing, suppress

import grpc
import pytest

from fixtures.grpc_servers import GrpcServer, unary_service
from fixtures.leaks import no_garbage_collector
from fixtures.waiting import WAIT_S
from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.registry.backends.etcd_client import EtcdClient, messages
from rpcwheel.registry.url import parse_url


def test_a_watch_stream_that_failed_is_in_no_reference_cycle():
    """The call would live until the interpreter ends, where its finalizer can wait forever."""
    client = EtcdClient(parse_url("etcd://127.0.0.1:1"), timeout_s=1.0)
    with closing(client), no_garbage_collector():
        stream = client.watch(())
        left = weakref.ref(stream)
        with suppress(RegistryUnavailable):
            next(iter(stream))
        del stream
        assert left() is None


@pytest.mark.parametrize(
    "text", ["Hostname Verification Check failed.", "Peer name a.b is not in peer certificate"]
)
def test_a_certificate_for_another_host_is_refused_with_the_text_of_each_grpcio(text):
    def refuse(request, context):
        context.abort(grpc.StatusCode.UNAVAILABLE, text)

    with GrpcServer(unary_service("/etcdserverpb.KV/Range", refuse)) as server:
        client = EtcdClient(parse_url(f"etcd://{server.target}"), timeout_s=WAIT_S)
        with closing(client), pytest.raises(RegistryRefused, match="is for this host"):
            client.call("KV/Range", messages().RangeRequest())
