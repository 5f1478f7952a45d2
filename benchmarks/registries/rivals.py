"""The least that sees what is published on an engine: one connection and one watch a session.

None of them outlives a failure of its engine: what that takes is in our figures, and not in theirs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import grpc

from rpcwheel.registry.url import parse_url


class Seen(Protocol):
    """What a subscriber gets."""

    def __len__(self) -> int:
        """How many instances there are."""

    def weight_of(self, name: str) -> int:
        """That of the instance with the greatest id, if it has this one; else -1."""


class Records:
    """Records by key; a listener of a rival looks at them before the next change."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self.by_key)

    def weight_of(self, name: str) -> int:
        """Decoded each time."""
        for key, value in reversed(self.by_key.items()):
            if key.endswith(name.encode()):
                return int(json.loads(value).get("weight", 100))
        return -1


Listener = Callable[[Seen], None]


def _etcd(url: str, service: str, listeners: Sequence[Listener]) -> ExitStack:
    """A stream of watches that begins with nothing, and takes every event as it comes."""
    from rpcwheel.registry.backends.etcd_client import messages

    words, parsed, stack = messages(), parse_url(url), ExitStack()
    prefix = f"/{parsed.namespace}/v1/{service}/".encode()
    first = words.WatchRequest(
        create=words.WatchCreateRequest(key=prefix, range_end=prefix[:-1] + b"0", start_revision=1)
    )
    own = [("grpc.use_local_subchannel_pool", 1)]
    channel = stack.enter_context(grpc.insecure_channel(url.removeprefix("etcd://"), options=own))
    over = threading.Event()

    def requests() -> Any:
        yield first
        over.wait()

    watch = channel.stream_stream(
        "/etcdserverpb.Watch/Watch",
        request_serializer=words.WatchRequest.SerializeToString,
        response_deserializer=words.WatchResponse.FromString,
    )(requests())

    def read() -> None:
        seen = Records()
        try:
            for response in watch:
                for event in response.events:
                    if event.type:
                        seen.by_key.pop(event.kv.key, None)
                    else:
                        seen.by_key[event.kv.key] = event.kv.value
                for listener in listeners:
                    listener(seen)
        except grpc.RpcError:
            over.set()  # it was cancelled

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(watch.cancel)
    stack.callback(over.set)
    return stack


def _zookeeper(url: str, service: str, listeners: Sequence[Listener]) -> ExitStack:
    """Kazoo's recipe; it reads all names again at each change, and no records."""
    from kazoo.client import KazooClient

    parsed, stack = parse_url(url), ExitStack()
    client = KazooClient(url.removeprefix("zookeeper://"), timeout=30)
    client.start()
    stack.callback(client.close)
    stack.callback(client.stop)
    path = f"/{parsed.namespace}/v1/{service}"
    client.ensure_path(path)

    def saw(names: list[str]) -> None:
        seen = Records()
        seen.by_key = dict.fromkeys([name.encode() for name in names], b"{}")
        for listener in listeners:
            listener(seen)

    client.ChildrenWatch(path, saw)
    return stack


def _redis(url: str, service: str, listeners: Sequence[Listener]) -> ExitStack:
    """Asks for the whole hash, and has the listeners called if it is another than before."""
    from redis import Redis

    parsed, stack = parse_url(url), ExitStack()
    prefix = f"{service}/".encode()
    client = stack.enter_context(Redis.from_url(url))
    over = threading.Event()

    def poll() -> None:
        before: dict[bytes, bytes] = {}
        while not over.wait(POLL_S):
            found: Any = client.hgetall(f"{{{parsed.namespace}}}:records")
            now = {key: data for key, data in found.items() if key.startswith(prefix)}
            if now != before:
                seen = Records()
                seen.by_key = before = now
                for listener in listeners:
                    listener(seen)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(over.set)
    return stack


POLL_S = 0.5

WATCH: dict[str, Callable[[str, str, Sequence[Listener]], ExitStack]] = {
    "etcd": _etcd,
    "zookeeper": _zookeeper,
    "redis": _redis,
}
