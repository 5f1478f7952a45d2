"""What a unary call costs through a channel by name, beside a bare one and grpc's own lists."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from itertools import cycle
from typing import Any

import grpc
import grpc.aio

from benchmarks.calls.scale import Row, World
from benchmarks.calls.unary import compare, compare_aio
from benchmarks.calls.wire import SERVICE
from benchmarks.connections.channels import OWN_CONNECTION
from benchmarks.connections.far import Far
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


def _targets(name: str, targets: Sequence[str], scale: Scale) -> Sequence[str]:
    """Where the channels of a subject go; all but one subject have one channel."""
    if name in (BARE, RECONNECTING):
        return targets[:1]
    if name == BY_HAND:
        return targets[: scale.few]
    if name in LB_POLICIES:
        size = {ONE: 1, MANY: scale.many}.get(name, scale.few)
        return [f"{_registry(size)}/{SERVICE}"]
    size = scale.few if name == GRPC_FEW else scale.many
    return ["ipv4:" + ",".join(targets[:size])]


class InTurn:
    """The rival to a channel by name with nothing in it: a bare channel each, called in turn.

    One function more than a bare channel needs.
    """

    def __init__(self, channels: Sequence[Any]) -> None:
        self._channels = channels

    def unary_unary(self, method: str) -> Callable[..., Any]:
        """Make a member of a stub."""
        following = cycle([channel.unary_unary(method) for channel in self._channels]).__next__

        def call(request: bytes, *, timeout: float | None = None) -> Any:
            return following()(request, timeout=timeout)

        return call


def _subject(name: str, channels: Sequence[Any]) -> Any:
    return InTurn(channels) if name == BY_HAND else channels[0]


def _options(name: str) -> Sequence[tuple[str, Any]]:
    in_turn = () if name in (BARE, BY_HAND) else (("grpc.service_config", IN_TURN),)
    return [*OWN_CONNECTION, *in_turn]


def _channel(name: str, target: str) -> Any:
    if name in LB_POLICIES:
        return resolver.insecure_channel(
            target, lb_policy=LB_POLICIES[name], registry_policy=POLICY
        )
    if name == RECONNECTING:
        return ReconnectingChannel(target)
    return grpc.insecure_channel(target, options=_options(name))


def _aio_channel(name: str, target: str) -> Any:
    if name in LB_POLICIES:
        return aio_resolver.insecure_channel(
            target, lb_policy=LB_POLICIES[name], registry_policy=POLICY
        )
    if name == RECONNECTING:
        return AioReconnectingChannel(target)
    return grpc.aio.insecure_channel(target, options=_options(name))


def _sync(targets: Sequence[str], scale: Scale) -> list[Row]:
    with ExitStack() as stack:
        channels: dict[str, Any] = {}
        for name in CALLERS:
            opened = [_channel(name, target) for target in _targets(name, targets, scale)]
            channels[name] = _subject(name, [stack.enter_context(each) for each in opened])
        return compare(channels, UNARY, BARE, scale)


def _aio(targets: Sequence[str], scale: Scale) -> list[Row]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        channels = runner.run(_open(targets, scale, stack))
        rows = compare_aio(runner, channels, UNARY, BARE, scale)
        runner.run(stack.aclose())
    return rows


async def _open(targets: Sequence[str], scale: Scale, stack: AsyncExitStack) -> dict[str, Any]:
    channels = {}
    for name in CALLERS:
        opened = [_aio_channel(name, target) for target in _targets(name, targets, scale)]
        channels[name] = _subject(name, [await stack.enter_async_context(each) for each in opened])
    return channels
