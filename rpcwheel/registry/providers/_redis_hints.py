"""Hints that something has changed, by Redis' pub/sub: one thread that listens, and can lose them.

A message that is lost costs time only: whoever is told looks now and then by himself.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Final

from redis.exceptions import RedisError

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis import Redis
    from redis.client import PubSub
    from redis.connection import AbstractConnection

__all__ = ["Hints"]

FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0

_JITTER: Final = random.SystemRandom()


class Hints:
    """Listens to one channel until it is closed. Begins with `start`."""

    def __init__(
        self,
        client: Redis,
        channel: str,
        *,
        quiet_s: float,
        hint: Callable[[str | None], None],
        lost: Callable[[BaseException], None],
    ) -> None:
        """Take note.

        Args:
            client: Its connections are used, one of them for good.
            channel: The channel's name.
            quiet_s: Seconds of silence after which the server is asked whether it is there; after
                as many more the connection is given up.
            hint: Told, on the thread that listens, of each message; None when messages may have
                been missed.
            lost: Told there that the connection broke.
        """
        self._client = client
        self._channel = channel
        self._quiet_s = quiet_s
        self._hint = hint
        self._lost = lost
        self._lock = threading.Lock()
        self._pubsub: PubSub | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to listen, if that has not begun."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="rpcwheel-redis", daemon=True
                )
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End it, and wait for the thread at most so long; any thread but its own."""
        self._closed.set()
        thread = self._thread
        end = time.monotonic() + timeout_s
        while thread is not None and thread.is_alive() and time.monotonic() < end:
            connection: AbstractConnection | None = getattr(self._pubsub, "connection", None)
            if connection is not None:  # again, as redis-py may just have connected anew
                connection.disconnect()  # type: ignore[no-untyped-call]
            thread.join(0.02)

    def _run(self) -> None:
        wait_s = FIRST_RETRY_S
        while not self._closed.is_set():
            try:
                with self._client.pubsub() as pubsub:  # type: ignore[no-untyped-call]
                    self._pubsub = pubsub
                    pubsub.subscribe(self._channel)
                    wait_s = self._listen(pubsub, wait_s)
            except Exception as error:
                if self._closed.is_set():  # under its hands; redis-py has many words for that
                    return
                if not isinstance(error, (RedisError, OSError)):
                    raise
                self._lost(error)
            self._closed.wait(_JITTER.uniform(0, wait_s))
            wait_s = min(wait_s * 2, LAST_RETRY_S)

    def _listen(self, pubsub: PubSub, wait_s: float) -> float:
        """Hear messages until silence says that nobody is there; gives the next wait."""
        asked = False
        while not self._closed.is_set():
            message = pubsub.get_message(timeout=self._quiet_s)
            if message is None:
                if asked:
                    raise TimeoutError(f"nothing heard for {2 * self._quiet_s:g} s")
                pubsub.ping()
                asked = True
                continue
            asked = False
            wait_s = FIRST_RETRY_S
            if message["type"] == "subscribe":
                self._hint(None)
            elif message["type"] == "message":
                self._hint(message["data"].decode(errors="replace").partition(" ")[0])
        return wait_s
