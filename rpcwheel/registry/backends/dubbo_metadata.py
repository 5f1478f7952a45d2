"""The metadata of Dubbo's applications, by revision, and calls of the providers that keep them.

A revision stands for the same services in all processes that have it, so it is looked up once. A
provider with Dubbo's default `metadata-type=local` answers for its metadata itself:
`MetadataServiceV2` over Triple, which is gRPC. Such a call may take as long as a request to the
registry. It is made on one of `MAX_THREADS` workers, so that neither kazoo's threads nor the reads
of other services wait for a provider that does not answer. Look-ups of other revisions may wait.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel.backoff import RANDOM
from rpcwheel.instance import grpc_target

from .dubbo_application import METADATA_VERSION, metadata_request, read_metadata_message

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from .dubbo_application import ApplicationMetadata

Revision: TypeAlias = tuple[str, str]
"""The name of an application, and one of its revisions."""

METHOD: Final = "/org.apache.dubbo.metadata.MetadataServiceV2/GetMetadataInfo"

MAX_ASKED: Final = 3
"""The number of processes of one revision that are asked until one answers."""

FIRST_WAIT_S: Final = 1.0
"""How long a read waits at most for the first answer about a revision. A provider that has just
been published answers in milliseconds, and its service is not shown without it. While one does not
answer, the reads of other services wait as long."""

MAX_THREADS: Final = 8
"""The number of threads of a registry that look up metadata, each with one channel at a time."""

MAX_REVISIONS: Final = 4096
"""The number of revisions that are kept; the one that was used least recently is dropped."""

WITHOUT_ANSWER: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
"""Codes whose details name the address that was asked. With them, the reason would be another one,
and be reported, each time that another process is asked."""

UNDER_WAY: Final = "no metadata service of its revision has answered yet"

OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # no connection of another channel, nor its backoff
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
)


class MetadataCache:
    """The metadata that are known, and the calls for others. Thread-safe.

    In a forked child it starts again.
    """

    def __init__(self, timeout_s: float, learned: Callable[[], object]) -> None:
        """Know nothing. `learned` is called on a worker when a provider answers; must not block."""
        self._timeout_s = timeout_s
        self._learned = learned
        self._closed = False
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget everything, in a forked child."""
        self._changed = threading.Condition()
        self._known: OrderedDict[Revision, ApplicationMetadata | str] = OrderedDict()
        self._under_way: dict[Revision, Any] = {}  # with the call, once it has begun

    def get(self, revision: Revision) -> ApplicationMetadata | str:
        """Return the metadata of a revision, or why they are not known."""
        with self._changed:
            if revision in self._known:
                self._known.move_to_end(revision)
            return self._known.get(revision, UNDER_WAY)

    def put(self, revision: Revision, metadata: ApplicationMetadata | str) -> None:
        """Note the metadata of a revision, or why they are not known."""
        with self._changed:
            self._known[revision] = metadata
            while len(self._known) > MAX_REVISIONS:
                self._known.popitem(last=False)

    def ask(self, revision: Revision, addresses: Sequence[tuple[str, int]]) -> bool:
        """Ask the metadata services at these addresses, until one answers. Returns at once.

        Returns:
            Whether none has failed to answer before, so that it is worth waiting.
        """
        with self._changed:
            is_first = revision not in self._known
            if revision in self._under_way or self._closed:
                return is_first
            self._under_way[revision] = None
        chosen = RANDOM.sample(addresses, min(MAX_ASKED, len(addresses)))
        key = self, hash(revision) % MAX_THREADS
        EXECUTOR.submit(key, partial(self._ask, revision, chosen))
        return is_first

    def wait(self, revisions: Collection[Revision], end_ns: int) -> None:
        """Wait until calls for these revisions have ended, at most `FIRST_WAIT_S`."""
        limit_s = min(FIRST_WAIT_S, (end_ns - time.monotonic_ns()) / 1e9)
        with self._changed:
            self._changed.wait_for(lambda: self._under_way.keys().isdisjoint(revisions), limit_s)

    def close(self) -> None:
        """Cancel all calls. Idempotent."""
        with self._changed:
            self._closed = True
            calls = list(self._under_way.values())
        for call in calls:
            if call is not None:
                call.cancel()

    # On a worker

    def _ask(self, revision: Revision, addresses: Sequence[tuple[str, int]]) -> None:
        learned: ApplicationMetadata | str = UNDER_WAY
        try:
            for host, port in addresses:
                learned = self._answer_of(revision, host, port)
                if not isinstance(learned, str):
                    break
        finally:
            self.put(revision, learned)
            with self._changed:
                del self._under_way[revision]
                self._changed.notify_all()
        if not isinstance(learned, str):
            self._learned()

    def _answer_of(self, revision: Revision, host: str, port: int) -> ApplicationMetadata | str:
        """Return the metadata that a process sends, or why it sends none."""
        try:
            return self._call(revision, grpc_target(host, port))
        except grpc.RpcError as error:
            status: Any = error
            reason = status.code().name
            if status.code() not in WITHOUT_ANSWER:
                reason += f": {status.details()}"
            error.__traceback__ = None  # the error is the call, which its frames would keep
        except grpc.FutureCancelledError:
            reason = "the registry was closed"
        except ValueError as error:
            reason = f"no valid answer: {error}"
        return f"no metadata service of its revision answers: {reason}"

    def _call(self, revision: Revision, target: str) -> ApplicationMetadata:
        application, name = revision
        headers = (("tri-service-version", METADATA_VERSION), ("tri-service-group", application))
        with grpc.insecure_channel(target, OPTIONS) as channel:
            with self._changed:
                if self._closed:
                    raise grpc.FutureCancelledError
                call = channel.unary_unary(METHOD).future(
                    metadata_request(name), self._timeout_s, headers
                )
                self._under_way[revision] = call
            return read_metadata_message(call.result())
