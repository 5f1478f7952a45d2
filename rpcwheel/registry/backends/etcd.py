"""The registry in etcd, 3.4 or newer: `etcd://10.0.0.1:2379,10.0.0.2:2379`, over TLS `etcds://`.

A record is a key `/{namespace}/v1/{service}/{id}` with a lease, one for all that this process
publishes. What etcd does when things go wrong decides how it is asked (measured with 3.4.23):

* It forgets a lease when its clock says so, also one that could not be renewed because etcd itself
  stood still; and all of them with its data. It never says so. So a renewal looks whether each
  record is still there, under this lease, in the same step.
* A lease and its keys outlive a restart with the data, and begin their time anew.

`user:password@` logs in; the token is renewed when etcd forgets it. Options: `tls`, and with TLS
`ca`, `cert` and `key` (files in PEM, read again for each connection), and `server_name` (that of
the certificate, where it is not the host's).
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

from rpcwheel.errors import RegistryError, RegistryUnavailable
from rpcwheel.registry.backend import RegistryBackend, View

from .etcd_client import EQUAL, LEASE, MOD_REVISION, EtcdClient, LeaseUnknown, messages
from .etcd_watch import EtcdWatches, by_id, end_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Lost, Settings, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl

__all__ = ["EtcdBackend"]

MOST_OPERATIONS: Final = 128
"""In one transaction; etcd's `--max-txn-ops`."""

MOST_BYTES: Final = 1_000_000
"""Of records in one transaction; etcd's `--max-request-bytes` is 1.5 MiB."""

REVOKE_S: Final = 1.0
"""Seconds that `close` gives etcd to take the lease back."""


_Encoded: TypeAlias = "tuple[ServiceInstance, bytes]"


class _Held(NamedTuple):
    """What was last published by a key."""

    lease: int
    epoch: str


class EtcdBackend(RegistryBackend):
    """A registry in etcd. Thread-safe; a forked child must open its own."""

    schemes: ClassVar[tuple[str, ...]] = ("etcd", "etcds")

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        """Take note; contacts nobody.

        Raises:
            ConfigurationError: The URL makes no sense for etcd, or names a file that can't be read.
            ExtraMissing: protobuf is not installed.
        """
        super().__init__(url, settings)
        self._messages = messages()
        self._client = EtcdClient(url, settings.timeout_s)
        self._watches = EtcdWatches(self._client, self._look, settings)
        self._root = f"/{url.namespace}/v1/".encode()
        self._lock = threading.Lock()  # for those two
        self._closing = False
        self._lease = 0
        self._fresh_until_s = 0.0  # half of its time is left until then, by `time.monotonic`
        self._why_lost: Lost = "lease"  # the lease before
        self._revision = 0
        self._held: dict[tuple[str, str], _Held] = {}
        self._unsure: set[tuple[str, str]] = set()  # whose publishing ended in an error
        self._to_settle: dict[tuple[str, str], tuple[ServiceInstance, bool]] = {}

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        """Put them, as many in one transaction as etcd takes."""
        self._must_be_open()
        latest = {instance.key: instance for instance in instances}
        for part in _parts(latest.values()):
            unsure = self._unsure & {each.key for each, _ in part}
            self._unsure.update(each.key for each, _ in part)
            try:
                self._put(part)
            except LeaseUnknown:
                self._lose("lease")
                self._put(part)
            for each, _ in part:
                self._unsure.discard(each.key)
                if each.key in unsure or each.key in self._to_settle:
                    self._to_settle[each.key] = each, True

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        """Delete those that are there with the same epoch."""
        self._must_be_open()
        self._delete(instances)
        for each in instances:
            self._held.pop(each.key, None)
            if each.key in self._unsure or each.key in self._to_settle:
                self._unsure.discard(each.key)
                self._to_settle[each.key] = each, False

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        """Keep the lease alive, look whether they are under it, and settle what was in doubt."""
        self._must_be_open()
        self._keep_alive()
        lost: dict[tuple[str, str], Lost] = {}
        for part in _parts(instances):
            for instance in self._missing([each for each, _ in part]):
                held = self._held.get(instance.key)
                former = held is not None and held.lease != self._lease
                lost[instance.key] = self._why_lost if former else "missing"
        self._settle(lost)
        return lost

    def _settle(self, lost: Collection[tuple[str, str]]) -> None:
        """Do once more what came after a publishing that had ended in an error.

        etcd may have carried that out later than what came after it: both wait in its sockets when
        it is frozen, on two connections.
        """
        puts = [each for key, (each, put) in self._to_settle.items() if put and key not in lost]
        for part in _parts(puts):
            self._put(part)
        self._delete([each for each, put in self._to_settle.values() if not put])
        self._to_settle.clear()

    def lookup(self, service: str) -> View:
        """Range over the service; linearizable, so it has all that was acknowledged to anybody."""
        prefix = self._prefix(service)
        revision, (records,) = self._look([prefix])
        return View(by_id(records, prefix), revision)

    def services(self) -> Sequence[str]:
        """Range over the keys of the namespace, without their values."""
        request = self._range(self._root)
        request.keys_only = True
        found = self._client.ask("KV/Range", request).kvs
        names = (each.key.removeprefix(self._root).partition(b"/") for each in found)
        return sorted({name.decode(errors="backslashreplace") for name, slash, _ in names if slash})

    def watch(self, service: str, watcher: Watcher) -> Watch:
        """Watch it on the one stream, on a thread of this backend's."""
        self._must_be_open()
        return self._watches.watch(self._prefix(service), watcher)

    def close(self) -> None:
        """Revoke the lease, which deletes what is still published; then end everything."""
        if self._client.forked:
            self._client.close()
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
            lease, self._lease = self._lease, 0
        self._watches.stop()
        if lease:
            request = self._messages.LeaseRevokeRequest(ID=lease)
            timeout_s = min(REVOKE_S, self.settings.timeout_s)
            with contextlib.suppress(RegistryError):  # it runs out by itself
                self._client.ask("Lease/LeaseRevoke", request, timeout_s)
        self._client.close()
        self._watches.join()

    def _must_be_open(self) -> None:
        if self._closing or self._client.forked:
            raise self._client.gone()

    def _prefix(self, service: str) -> bytes:
        """With the slash at the end: `shop` is not `shop-v2`."""
        return self._root + service.encode() + b"/"

    def _key(self, instance: ServiceInstance) -> bytes:
        return self._prefix(instance.service) + instance.id.encode()

    def _range(self, prefix: bytes) -> Any:
        return self._messages.RangeRequest(key=prefix, range_end=end_of(prefix))

    def _transact(self, *, once: bool = False, **parts: Iterable[object]) -> Any:
        answer = self._client.ask("KV/Txn", self._messages.TxnRequest(**parts), once=once)
        self._revision = max(self._revision, answer.header.revision)
        return answer

    def _put(self, part: Sequence[_Encoded]) -> None:
        lease = self._granted()
        made = self._messages
        for each, _ in part:  # before it is done: an answer can be lost
            self._held[each.key] = _Held(lease, each.epoch)
        puts = (
            made.PutRequest(key=self._key(each), value=data, lease=lease) for each, data in part
        )
        self._transact(once=True, success=[made.RequestOp(put=put) for put in puts])

    def _granted(self) -> int:
        """The lease; a new one if there is none.

        While nothing is published nobody renews it: what is put then would be gone before the first
        renewal, which comes after a third of a whole lease.
        """
        if self._lease and time.monotonic() > self._fresh_until_s:
            self._keep_alive()
        if self._lease:
            return self._lease
        request = self._messages.LeaseGrantRequest(TTL=math.ceil(self.settings.lease_s))
        answer = self._ask_lease("LeaseGrant", request)
        if not answer.ID:
            raise RegistryUnavailable(f"{self.url}: no lease: {answer.error}")
        if answer.header.revision < self._revision:
            self._lose("wiped")
        self._revision = answer.header.revision
        with self._lock:
            if not self._closing:
                self._lease = answer.ID
        return int(answer.ID)

    def _keep_alive(self) -> None:
        if not self._lease:
            return
        request = self._messages.LeaseKeepAliveRequest(ID=self._lease)
        answer = self._ask_lease("LeaseKeepAlive", request)
        if answer.TTL <= 0:
            self._lose("wiped" if answer.header.revision < self._revision else "lease")
            self._revision = answer.header.revision

    def _ask_lease(self, method: str, request: Any) -> Any:
        """Begin the lease's time, anew perhaps; counted from before it was asked."""
        half_s = time.monotonic() + self.settings.lease_s / 2
        answer = self._client.ask(f"Lease/{method}", request)
        self._fresh_until_s = half_s
        return answer

    def _lose(self, why: Lost) -> None:
        self._lease, self._why_lost = 0, why

    def _missing(self, instances: Sequence[ServiceInstance]) -> list[ServiceInstance]:
        """Those that are not under the lease, or were published with another epoch."""
        ours = [each for each in instances if self._is_held(each)]
        missing = [each for each in instances if not self._is_held(each)]
        if not ours:
            return missing
        made = self._messages
        same = [
            made.Compare(result=EQUAL, target=LEASE, key=self._key(each), lease=self._lease)
            for each in ours
        ]
        ranges = (made.RangeRequest(key=self._key(each), keys_only=True) for each in ours)
        looks = [made.RequestOp(range=request) for request in ranges]
        answer = self._transact(compare=same, failure=looks)
        if answer.succeeded:
            return missing
        for each, response in zip(ours, answer.responses, strict=True):
            if not any(found.lease == self._lease for found in response.range.kvs):
                missing.append(each)
        return missing

    def _is_held(self, instance: ServiceInstance) -> bool:
        return self._lease != 0 and self._held.get(instance.key) == (self._lease, instance.epoch)

    def _delete(self, instances: Iterable[ServiceInstance]) -> None:
        """Read the epochs, and delete what has not changed since; if it has, read again."""
        made = self._messages
        for part in _parts(instances):
            left = [each for each, _ in part]
            while left:
                requests = (made.RangeRequest(key=self._key(each)) for each in left)
                answer = self._transact(success=[made.RequestOp(range=one) for one in requests])
                found = {
                    kv.key: kv.mod_revision
                    for each, response in zip(left, answer.responses, strict=True)
                    for kv in response.range.kvs
                    if epoch_of(kv.value) == each.epoch
                }
                left = [each for each in left if self._key(each) in found]
                if not left or self._deleted(found):
                    break

    def _deleted(self, found: Mapping[bytes, int]) -> bool:
        """Delete these if all are still of these revisions."""
        made = self._messages
        same = [
            made.Compare(result=EQUAL, target=MOD_REVISION, key=key, mod_revision=revision)
            for key, revision in found.items()
        ]
        requests = (made.DeleteRangeRequest(key=key) for key in found)
        deletes = [made.RequestOp(delete_range=request) for request in requests]
        return bool(self._transact(compare=same, success=deletes).succeeded)

    def _look(self, prefixes: Iterable[bytes]) -> tuple[int, list[Mapping[bytes, bytes]]]:
        """What is below each of them, as of one revision."""
        looks = [self._messages.RequestOp(range=self._range(prefix)) for prefix in prefixes]
        answer = self._client.ask("KV/Txn", self._messages.TxnRequest(success=looks))
        found: list[Mapping[bytes, bytes]] = [
            {kv.key: kv.value for kv in each.range.kvs} for each in answer.responses
        ]
        return int(answer.header.revision), found


def epoch_of(data: bytes) -> str | None:
    """Of a record; None if it is none."""
    try:
        told = json.loads(data)
    except ValueError:
        return None
    epoch = told.get("epoch", "") if isinstance(told, dict) else None
    return epoch if isinstance(epoch, str) else None


def _parts(instances: Iterable[ServiceInstance]) -> Iterator[list[_Encoded]]:
    """What fits in one transaction, one after the other."""
    part: list[_Encoded] = []
    size = 0
    for instance in instances:
        data = instance.encoded()
        if len(part) == MOST_OPERATIONS or (part and size + len(data) > MOST_BYTES):
            yield part
            part, size = [], 0
        part.append((instance, data))
        size += len(data)
    if part:
        yield part
