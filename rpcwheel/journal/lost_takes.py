"""Requests that may have taken calls, though their answers were lost with the connection.

Their worker does not know these calls, and renews its lease: they would wait until its process
ends. So each request has a number, which is stored with the calls that it takes, and the next one
makes the calls ready again whose number belongs to a lost answer.
"""

from __future__ import annotations

import random
import time
from typing import Final

LOST_S: Final = 60.0
"""How long such calls are looked for: a server that was stopped executes a request later."""


class LostTakes:
    """The requests of one backend whose answers were lost."""

    def __init__(self) -> None:
        self._lost: list[tuple[float, str, int]] = []

    @staticmethod
    def new_number() -> int:
        """Make the number of a request."""
        return random.getrandbits(62)

    def add(self, worker: str, number: int) -> None:
        """Note that the answer of a request was lost."""
        self._lost.append((time.monotonic(), worker, number))

    def of(self, worker: str) -> list[int]:
        """The numbers of a worker's requests."""
        if not self._lost:
            return []
        since_s = time.monotonic() - LOST_S
        self._lost = [request for request in self._lost if request[0] > since_s]
        return [number for _, name, number in self._lost if name == worker]
