"""The subjects by name, and what each step is of."""

from __future__ import annotations

UNARY, PICK, CONVERGE, REPUBLISH = "unary", "pick", "converge", "republish"
CHANNEL_PICK, RESTART = "channel pick", "restart"
"""What rows are of."""

BARE, RECONNECTING = "bare channel", "rpcwheel: ReconnectingChannel"
BY_HAND = "bare channels in turn, few"
"""What calls that go to several connections cost grpc itself: the least that is possible."""
GRPC_FEW, GRPC_MANY = "grpc: ipv4: list, few", "grpc: ipv4: list, many"
ONE, FEW, MANY = "rpcwheel: by name, one", "rpcwheel: by name, few", "rpcwheel: by name, many"
RANDOM, LEAST = "rpcwheel: few, weighted_random", "rpcwheel: few, least_request"
HASH = "rpcwheel: few, ring_hash"
CALLERS = (
    BARE,
    BY_HAND,
    GRPC_FEW,
    GRPC_MANY,
    RECONNECTING,
    ONE,
    FEW,
    MANY,
    RANDOM,
    LEAST,
    HASH,
)
"""The channels that make unary calls."""

LB_POLICIES = {
    ONE: "weighted_round_robin",
    FEW: "weighted_round_robin",
    MANY: "weighted_round_robin",
    RANDOM: "weighted_random",
    LEAST: "least_request",
    HASH: "ring_hash:x-user-id",
}
"""Of the channels by name."""

CHOICE = "random.choice"
"""What picks are compared with."""
EQUAL, WEIGHTED = "RoundRobin", "WeightedRoundRobin, other weights"
BY_CHANCE = "WeightedRandom"
IDLE, BUSY = "LeastRequest, all idle", "LeastRequest, all busy"
BUSY_WEIGHTED = "LeastRequest, busy, other weights"
RING = "RingHash"
PICKERS = (CHOICE, EQUAL, WEIGHTED, BY_CHANCE, IDLE, BUSY, BUSY_WEIGHTED, RING)

STATE = "get_state() of one channel"
"""What picks of channels are compared with."""
CHANNEL_PICKERS = {
    "weighted_round_robin": "weighted_round_robin",
    "least_request": "least_request",
    "ring_hash": "ring_hash:x-user-id",
}
"""Of the channels whose picks are measured."""

ENGINES = ("memory", "sqlite", "etcd", "zookeeper", "redis")
OURS = "rpcwheel"
RIVALS = {
    "etcd": "a bare watch",
    "zookeeper": "kazoo's ChildrenWatch",
    "redis": "a poll of the hash, each 0.5 s",
}
"""Who else sees what is published on an engine: one a session, and nothing that survives a
failure."""

CHANNEL = "rpcwheel: a channel by name"
"""What sees a rolling restart; beside it the rival of the engine."""

WIPED = ("memory", "etcd", "zookeeper", "redis")
"""Engines that are started again without what they knew."""
SPREAD, AT_ONCE = "over the window", "jitter=1 ms"


def watching(engine: str) -> tuple[str, ...]:
    """The subscribers of an engine."""
    return (OURS, RIVALS[engine]) if engine in RIVALS else (OURS,)
