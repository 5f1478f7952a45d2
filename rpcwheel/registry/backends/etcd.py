"""The registry in etcd, 3.4 or newer: `etcd://10.0.0.1:2379,10.0.0.2:2379`, over TLS `etcds://`.

A record is a key `/{namespace}/v1/{service}/{id}` with a lease. All records that this process
publishes have the same lease. How etcd behaves in failures (measured with 3.4.23):

* It ends a lease when its time is over by etcd's clock, even if no renewal was possible because
  etcd itself was frozen. If it loses its data, all leases are gone. It notifies nobody. So each
  renewal checks whether every record is still there with this lease.
* A restart with the data keeps a lease and its keys, and the time of the lease starts anew.
* A member that was frozen applies the requests that waited in its sockets. So a put may be applied
  after the record was withdrawn through another member. Therefore, if a put gets no answer, its
  lease is *abandoned*: later puts get a new lease, and the next renewal moves all records to that
  and revokes the abandoned one. etcd then refuses the late put, or deletes what it has put.

`user:password@` logs in. Options: `tls`, and with TLS `ca`, `cert` and `key` (files in PEM, read
again for each connection) and `server_name` (the name in the certificate, if it is not the host).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from rpcwheel.errors import RegistryError, RegistryUnavailable
from rpcwheel.instance import record_epoch
from rpcwheel.registry.backend import RegistryBackend, View

from .etcd_client import (
    EQUAL,
    MAX_OPERATIONS,
    MOD_REVISION,
    EtcdClient,
    LeaseUnknown,
    messages,
)
from .etcd_watch import EtcdWatches, id_of, range_end

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Lost, Settings, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl

MAX_BYTES: Final = 1_000_000
"""Bytes of records in one transaction. etcd's default for `--max-request-bytes` is 1.5 MiB."""

REVOKE_TIMEOUT_S: Final = 1.0
"""How long `close` waits at most to revoke a lease. A lease that is not revoked ends by itself."""


_Encoded: TypeAlias = "tuple[ServiceInstance, bytes]"
"""An instance and its record."""


class _Put(NamedTuple):
    """The last put of a key by this process."""

    lease: int
    epoch: str


class EtcdBackend(RegistryBackend):
    """A registry in etcd. Thread-safe; a forked child must open its own."""

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        self._messages = messages()
        self._client = EtcdClient(url, settings.timeout_s)
        self._root = f"/{url.namespace}/v1/".encode()
        self._watches = EtcdWatches(
            self._client, url, settings, prefix_of=self._prefix, read=self._read
        )
        self._lock = threading.Lock()
        """Makes `close`, on any thread, see all leases that were granted or abandoned before it."""
        self._lease = 0
        """The id of the lease; 0: there is none."""
        self._renew_by_s = 0.0
        """The time, by `time.monotonic`, from which less than half of the lease is left."""
        self._why_lost: Lost = "lease"
        """Why the previous lease was lost."""
        self._last_revision = 0
        """The highest revision in a response. A lower one later means that etcd lost its data."""
        self._puts: dict[tuple[str, str], _Put] = {}
        """By `ServiceInstance.key`."""
        self._abandoned: set[int] = set()
        """Leases of puts that got no answer, until they are revoked."""

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        """Put the records, in as few transactions as etcd allows."""
        self._check_open()
        latest = {instance.key: instance for instance in instances}
        for batch in _batches(latest.values()):
            self._put(batch)

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        self._check_open()
        self._delete(instances)
        for each in instances:
            put = self._puts.get(each.key)
            if put is not None and put.epoch == each.epoch:
                del self._puts[each.key]

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        self._check_open()
        self._keep_alive()
        leases = self._read_leases(instances)
        if self._abandoned:
            self._leave_abandoned_leases(instances, leases)
        lost: dict[tuple[str, str], Lost] = {}
        for each in instances:
            put = self._puts.get(each.key)
            if put is None:
                lost[each.key] = "missing"
            elif put.lease != self._lease:
                lost[each.key] = self._why_lost
            elif put.epoch != each.epoch or leases.get(each.key) != put.lease:
                lost[each.key] = "missing"
        return lost

    def lookup(self, service: str) -> View:
        """Read the records of a service. Linearizable: all writes acknowledged before are seen."""
        return self._read([service])[0]

    def services(self) -> Sequence[str]:
        """Read the keys of the namespace without their values."""
        request = self._range(self._root)
        request.keys_only = True
        pairs = self._client.call("KV/Range", request).kvs
        names = (each.key.removeprefix(self._root).partition(b"/") for each in pairs)
        return sorted({name.decode(errors="backslashreplace") for name, slash, _ in names if slash})

    def watch(self, service: str, watcher: Watcher) -> Watch:
        """Add a watch to the backend's stream; the watcher is called on a worker thread."""
        self._check_open()
        return self._watches.watch(service, watcher)

    def close(self) -> None:
        """Revoke the lease, which deletes the published records, and close all connections."""
        if self._client.forked:
            self._client.close()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            leases = {self._lease, *self._abandoned} - {0}
            self._lease = 0
        self._watches.close()
        with contextlib.suppress(RegistryError):  # leases end by themselves
            for lease in leases:
                self._revoke(lease, min(REVOKE_TIMEOUT_S, self.settings.timeout_s))
        self._client.close()

    def _check_open(self) -> None:
        if self._closed or self._client.forked:
            raise self._client.closed_error()

    def _prefix(self, service: str) -> bytes:
        """Return the prefix of a service's keys. The slash excludes `shop-v2` from `shop`."""
        return self._root + service.encode() + b"/"

    def _key(self, instance: ServiceInstance) -> bytes:
        return self._prefix(instance.service) + instance.id.encode()

    def _range(self, prefix: bytes) -> Any:
        return self._messages.RangeRequest(key=prefix, range_end=range_end(prefix))

    def _read(self, services: Sequence[str]) -> list[View]:
        """Read the records of services in one transaction."""
        prefixes = [self._prefix(service) for service in services]
        ranges = [self._messages.RequestOp(range=self._range(prefix)) for prefix in prefixes]
        response = self._client.call("KV/Txn", self._messages.TxnRequest(success=ranges))
        contents = (
            {id_of(kv.key, prefix): kv.value for kv in each.range.kvs}
            for prefix, each in zip(prefixes, response.responses, strict=True)
        )
        return [View(records, response.header.revision) for records in contents]

    def _transact(self, *, once: bool = False, **parts: Iterable[object]) -> Any:
        """Run a transaction with the `compare` and `success` of a `TxnRequest`.

        `once`: send it to one member only, as it must not be applied late; see `EtcdClient.call`.
        """
        response = self._client.call("KV/Txn", self._messages.TxnRequest(**parts), once=once)
        self._last_revision = max(self._last_revision, response.header.revision)
        return response

    def _put(self, batch: Sequence[_Encoded]) -> None:
        try:
            self._put_with(self._current_lease(), batch)
        except LeaseUnknown:
            self._lose_lease("lease")
            self._put_with(self._current_lease(), batch)

    def _put_with(self, lease: int, batch: Sequence[_Encoded]) -> None:
        messages = self._messages
        for each, _ in batch:  # before the request, which may be executed without a response
            self._puts[each.key] = _Put(lease, each.epoch)
        puts = (
            messages.PutRequest(key=self._key(each), value=data, lease=lease)
            for each, data in batch
        )
        try:
            self._transact(once=True, success=[messages.RequestOp(put=put) for put in puts])
        except RegistryUnavailable:  # the put may be applied later
            with self._lock:
                self._abandoned.add(lease)
                self._lease = 0
            raise

    def _current_lease(self) -> int:
        """Return a lease with at least half of its time left; a new one if there is none.

        While nothing is published, nobody renews the lease. It may be about to end, and the first
        regular renewal comes only a third of a lease after the put. So it is renewed here.

        A renewal also tests a new connection: it is sent to the next member if there is no answer,
        which a put is not.
        """
        is_untested = not self._client.is_connected
        if is_untested or time.monotonic() > self._renew_by_s:
            self._keep_alive()
        if self._lease:
            return self._lease
        request = self._messages.LeaseGrantRequest(TTL=math.ceil(self.settings.lease_s))
        response = self._request_lease("LeaseGrant", request)
        if not response.ID:
            raise RegistryUnavailable(f"{self.url}: no lease: {response.error}")
        if response.header.revision < self._last_revision:
            self._lose_lease("wiped")
        self._last_revision = response.header.revision
        with self._lock:
            if not self._closed:
                self._lease = response.ID
        return int(response.ID)

    def _keep_alive(self) -> None:
        """Renew the lease if there is one, and forget it if etcd does not know it any more."""
        if not self._lease:
            return
        request = self._messages.LeaseKeepAliveRequest(ID=self._lease)
        response = self._request_lease("LeaseKeepAlive", request)
        if response.TTL <= 0:
            self._lose_lease("wiped" if response.header.revision < self._last_revision else "lease")
            self._last_revision = response.header.revision

    def _request_lease(self, method: str, request: Any) -> Any:
        """Grant or renew the lease. Its time counts from before the request, to be safe."""
        half_lease_s = time.monotonic() + self.settings.lease_s / 2
        response = self._client.call(f"Lease/{method}", request)
        self._renew_by_s = half_lease_s
        return response

    def _leave_abandoned_leases(
        self, instances: Iterable[ServiceInstance], leases: dict[tuple[str, str], int]
    ) -> None:
        """Put the records with abandoned leases again, update `leases`, and revoke the leases."""
        moved = [each for each in instances if leases.get(each.key) in self._abandoned]
        self.publish(moved)
        leases.update((each.key, self._lease) for each in moved)
        for lease in list(self._abandoned):
            self._revoke(lease, self.settings.timeout_s)
            self._abandoned.discard(lease)

    def _revoke(self, lease: int, timeout_s: float) -> None:
        """Revoke a lease, which deletes the records with it."""
        with contextlib.suppress(LeaseUnknown):
            request = self._messages.LeaseRevokeRequest(ID=lease)
            self._client.call("Lease/LeaseRevoke", request, timeout_s)

    def _lose_lease(self, why: Lost) -> None:
        self._lease, self._why_lost = 0, why

    def _read_leases(self, instances: Iterable[ServiceInstance]) -> dict[tuple[str, str], int]:
        """Return the leases of the records that are there with their epoch, by `key`."""
        return {
            each.key: int(kv.lease)
            for batch in _batches(instances)
            for each, kv in self._read_own([each for each, _ in batch])
        }

    def _read_own(self, batch: Sequence[ServiceInstance]) -> list[tuple[ServiceInstance, Any]]:
        """Read the records of instances in one transaction. Those of another epoch are left out."""
        messages = self._messages
        requests = (messages.RangeRequest(key=self._key(each)) for each in batch)
        response = self._transact(
            success=[messages.RequestOp(range=request) for request in requests]
        )
        return [
            (each, kv)
            for each, read in zip(batch, response.responses, strict=True)
            for kv in read.range.kvs
            if record_epoch(kv.value) == each.epoch
        ]

    def _delete(self, instances: Iterable[ServiceInstance]) -> None:
        """Delete the records that have the same epoch.

        etcd cannot compare epochs. So each batch is read, and deleted if no key was written since;
        otherwise it is read again.
        """
        for batch in _batches(instances):
            left = [each for each, _ in batch]
            while left:
                own = self._read_own(left)
                left = [each for each, _ in own]
                if not left or self._delete_unchanged({kv.key: kv.mod_revision for _, kv in own}):
                    break

    def _delete_unchanged(self, revisions: Mapping[bytes, int]) -> bool:
        """Delete these keys if all still have these revisions; otherwise return False."""
        messages = self._messages
        same = [
            messages.Compare(result=EQUAL, target=MOD_REVISION, key=key, mod_revision=revision)
            for key, revision in revisions.items()
        ]
        requests = (messages.DeleteRangeRequest(key=key) for key in revisions)
        deletes = [messages.RequestOp(delete_range=request) for request in requests]
        return bool(self._transact(compare=same, success=deletes).succeeded)


def _batches(instances: Iterable[ServiceInstance]) -> Iterator[list[_Encoded]]:
    """Split instances into batches that fit in one transaction each, with their records."""
    batch: list[_Encoded] = []
    size = 0
    for instance in instances:
        data = instance.encoded()
        if len(batch) == MAX_OPERATIONS or (batch and size + len(data) > MAX_BYTES):
            yield batch
            batch, size = [], 0
        batch.append((instance, data))
        size += len(data)
    if batch:
        yield batch
