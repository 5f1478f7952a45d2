"""One look at the process's sockets: which of them are the server's, and what the table gets of it.

A socket is the server's if its own end is where the server listens, as the user says, or where a
call of the server's was seen. Two servers of one process that share address and port
(`SO_REUSEPORT`) can't be told apart.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

from .entry import Sighting
from .peers import SUPPORTED, Slot, open_sockets

if TYPE_CHECKING:
    from .peers import Address
    from .ports import Ports
    from .table import Connections

__all__ = ["Scan"]


class Scan:
    """How the sockets of one server are found. By one thread at a time."""

    def __init__(self, ports: Ports) -> None:
        """Take where the server listens.

        Raises:
            OSError: The process has no descriptor left.
        """
        self._ports = ports
        self._learned: set[Address] = set()
        self.slot = Slot() if SUPPORTED else None
        """For all scans of this server."""

    def look(self, connections: Connections) -> tuple[str, int | None] | None:
        """Bring the table up to date.

        Returns:
            Who calls although it is at no port of the server's, as the user said them, and at which
            it is, if that was found.
        """
        ports, learned = self._ports, self._learned
        began_ns, known = connections.now_ns(), connections.addresses()
        numbers = ports.numbers | {port for _, port in learned}
        listening: set[Address] = set()

        def is_wanted(peer: Address, port: int) -> bool:
            return port in numbers or peer in known

        with closing(open_sockets(is_wanted, slot=self.slot, listening=listening)) as sockets:
            found = [Sighting.of(one) for one in sockets]
        self._learn(found, known)
        mine = [one for one in found if ports.has(one.local, learned, listening)]
        lost = connections.reconcile(mine, began_ns)
        if ports.tcp is None:
            return None
        elsewhere = [(one.text, one.local[1]) for one in found if one.local[1] not in numbers]
        nowhere = [
            (entry.peer, None)
            for entry in lost
            if entry.inode is None and entry.sighted_ns < began_ns
        ]
        return next(iter([*elsewhere, *nowhere]), None)

    def _learn(self, found: list[Sighting], known: set[Address]) -> None:
        """Where calls come in; a peer with two sockets says nothing.

        What the user said holds: another port is never learned.
        """
        peers = Counter(one.peer for one in found)
        numbers = self._ports.numbers
        self._learned.update(
            one.local
            for one in found
            if (self._ports.tcp is None or one.local[1] in numbers)
            and one.peer in known
            and peers[one.peer] == 1
        )
