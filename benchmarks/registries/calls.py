"""What a unary call costs through a channel by name, beside a bare one and grpc's own lists."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from benchmarks.calls.scale import Row, World
from benchmarks.calls.unary import compare, compare_aio
from benchmarks.calls.wire import SERVICE
from benchmarks.connections.channels import OWN_CONNECTION
from benchmarks.connections.far import Far
from benchmarks.registries.by_hand import AioInTurn, InTurn
from benchmarks.registries.scale import Scale
from benchmarks.registries.subjects import (
    BARE,
    BY_HAND,
    CALLERS,
    GRPC_FEW,
    LB_POLICIES,
    MANY,
    ONE,
    RECONNECTING,
    UNARY,
)
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import RegistryPolicy, open_registry
from rpcwheel.resolver import aio as aio_resolver
from rpcwheel.resolver import sync as resolver
from rpcwheel.transport import ReconnectingChannel
from rpcwheel.transport.aio import ReconnectingChannel as AioReconnectingChannel

POLICY = RegistryPolicy(snapshot=False)
IN_TURN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})


def measure(world: World, scale: Scale) -> list[Row]:
    """A row for each subject, by the client's cost."""
    with Far("aio", *map(str, range(scale.many))) as far:
        targets = list(far.targets.values())
        with _published(targets, scale):
            return _sync(targets, scale) if world == "sync" else _aio(targets, scale)


@contextmanager
def _published(targets: Sequence[str], scale: Scale) -> Iterator[None]:
    """Have so many of them in a registry of its own, for each number that is asked for."""
    with ExitStack() as stack:
        for size in {1, scale.few, scale.many}:
            registry = stack.enter_context(open_registry(_registry(size), registry_policy=POLICY))
            for target in targets[:size]:
                host, _, port = target.rpartition(":")
                instance = ServiceInstance(service=SERVICE, host=host, port=int(port))
                registry.register(instance, wait=30)
        yield


def _registry(size: int) -> str:
    return f"memory://bench{size}"


def _target(name: str, targets: Sequence[str], scale: Scale) -> str:
    """Where the channel of a subject goes."""
    if name in (BARE, RECONNECTING):
        return targets[0]
    if name == BY_HAND:
        return ",".join(targets[: scale.few])
    if name in LB_POLICIES:
        size = {ONE: 1, MANY: scale.many}.get(name, scale.few)
        return f"{_registry(size)}/{SERVICE}"
    size = scale.few if name == GRPC_FEW else scale.many
    return "ipv4:" + ",".join(targets[:size])


LISTED = [*OWN_CONNECTION, ("grpc.service_config", IN_TURN)]


def _channel(name: str, target: str) -> Any:
    if name == BY_HAND:
        return InTurn([_channel(BARE, one) for one in target.split(",")])
    if name in LB_POLICIES:
        return resolver.insecure_channel(
            target, lb_policy=LB_POLICIES[name], registry_policy=POLICY
        )
    if name == RECONNECTING:
        return ReconnectingChannel(target)
    return grpc.insecure_channel(target, options=OWN_CONNECTION if name == BARE else LISTED)


def _aio_channel(name: str, target: str) -> Any:
    if name == BY_HAND:
        return AioInTurn([_aio_channel(BARE, one) for one in target.split(",")])
    if name in LB_POLICIES:
        return aio_resolver.insecure_channel(
            target, lb_policy=LB_POLICIES[name], registry_policy=POLICY
        )
    if name == RECONNECTING:
        return AioReconnectingChannel(target)
    return grpc.aio.insecure_channel(target, options=OWN_CONNECTION if name == BARE else LISTED)


def _sync(targets: Sequence[str], scale: Scale) -> list[Row]:
    with ExitStack() as stack:
        channels: dict[str, Any] = {
            name: stack.enter_context(_channel(name, _target(name, targets, scale)))
            for name in CALLERS
        }
        return compare(channels, UNARY, BARE, scale)


def _aio(targets: Sequence[str], scale: Scale) -> list[Row]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        channels = runner.run(_open(partial(_target, targets=targets, scale=scale), stack))
        rows = compare_aio(runner, channels, UNARY, BARE, scale)
        runner.run(stack.aclose())
    return rows


async def _open(target: Any, stack: AsyncExitStack) -> dict[str, grpc.aio.Channel]:
    return {
        name: await stack.enter_async_context(_aio_channel(name, target(name))) for name in CALLERS
    }
