"""The etcd client without an etcd."""

import weakref
from contextlib import closing, suppress

from fixtures.leaks import no_garbage_collector
from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry.backends.etcd_client import EtcdClient
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
