"""What is measured, and how many of each: the growth of the process is divided by that number."""

from __future__ import annotations

from dataclasses import dataclass

BODY = b"x" * 300
"""The request of each call."""

QUEUED, QUEUED_AIO = "queued call, `grpc`", "queued call, `grpc.aio`"
BARE, RECONNECTING = "connection, bare channel", "connection, `kit.channel`"
HEARTBEAT = "connection, `kit.channel` with a heartbeat"
SERVER_BARE, SERVER_IDLE = "connection of a server, bare", "connection of a server with `idle`"
INSTANCES = "instance, published and followed, `memory://`"
BREAKERS = "method with a breaker and a throttle"
METHODS = "method in the counts of calls"
TIMEOUTS = "timeout of the timer"


@dataclass(frozen=True, slots=True)
class Scale:
    """How many there are of each."""

    small: int  # such as queued calls and timeouts
    connections: int
    methods: int
    stored: int  # calls in a journal

    def number(self, subject: str) -> int:
        """How many of a subject."""
        if "connection" in subject:
            return self.connections
        return self.methods if "method" in subject else self.small


SCALES = {
    "full": Scale(small=20_000, connections=500, methods=250, stored=50_000),
    "quick": Scale(small=5_000, connections=100, methods=100, stored=5_000),
}

OF_CLIENTS = (QUEUED, QUEUED_AIO, BARE, RECONNECTING, HEARTBEAT)
OF_SERVERS = (SERVER_BARE, SERVER_IDLE)
OTHERS = (INSTANCES, BREAKERS, METHODS, TIMEOUTS)
SUBJECTS = (*OF_CLIENTS, *OF_SERVERS, *OTHERS)


@dataclass(frozen=True, slots=True)
class Growth:
    """What a process occupies more than before, for each of `number` subjects."""

    subject: str
    number: int
    memory: float
    """Bytes each."""
    threads: int
    """In all."""
    descriptors: float
    """Each."""


@dataclass(frozen=True, slots=True)
class Disk:
    """What an engine occupies for each stored call, in bytes, and after all were delivered."""

    engine: str
    number: int
    stored: float
    delivered: float


@dataclass(frozen=True, slots=True)
class Series:
    """How many series Prometheus gets from a process."""

    subject: str
    first: int
    """With one of the subject, beyond an idle kit."""
    next: int
    """Each further one."""


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads a process has after each of some steps."""

    steps: dict[str, int]
