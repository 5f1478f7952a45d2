"""The kit as type checkers see it. Never run; `make types` reads it."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import assert_type

import grpc
import grpc.aio

import rpcwheel
from rpcwheel import (
    CallPolicy,
    DeadlinePolicy,
    DefaultResponsePolicy,
    FailbackPolicy,
    HeartbeatPolicy,
    IdlePolicy,
    Kit,
    MethodPolicy,
    Publisher,
    RegistryPolicy,
    RetryPolicy,
    aio,
)
from rpcwheel.call import call_options
from rpcwheel.failback import FailbackStats, FailedCall, QueueEntry
from rpcwheel.heartbeat import Heartbeat
from rpcwheel.idle import Connection, IdleConnectionDetector
from rpcwheel.idle import aio as aio_idle
from rpcwheel.kit import KitPolicy
from rpcwheel.timer import ManualTimer


def settings() -> None:
    policy = CallPolicy(
        timeout=DeadlinePolicy(timeout=timedelta(seconds=2), slow_call_threshold=1),
        retry=RetryPolicy(
            retry_on={grpc.StatusCode.UNAVAILABLE}, max_attempts=4, retry_budget=None
        ),
        methods={
            "/shop.Orders/Get*": MethodPolicy(timeout=5.0, idempotent=True),
            "/shop.Audit/*": MethodPolicy(
                failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=1.0)
            ),
        },
    )
    assert_type(policy.policy_for("/shop.Orders/Get"), MethodPolicy)
    assert_type(policy.timeout, DeadlinePolicy | None)
    MethodPolicy(timout=2.0)  # type: ignore[call-arg]
    assert_type(Kit.from_policy(policy, timer=ManualTimer()), Kit)
    assert_type(Kit.from_file(Path("shop.toml")), Kit)
    assert_type(rpcwheel.aio.Kit.from_env("SHOP_RPC_"), aio.Kit)
    assert_type(Kit(timeout=timedelta(seconds=2)).policy, KitPolicy)
    assert_type(policy.replace(timeout=3.0), CallPolicy)
    Kit(
        timeout=DeadlinePolicy(timeout=2.0),
        default_response=DefaultResponsePolicy(on=OSError, default=b""),
    )
    Kit(timeout="2")  # type: ignore[arg-type]
    Kit(heartbeat=10.0, idle=timedelta(minutes=3))
    Kit(heartbeat=HeartbeatPolicy(interval=None), idle=IdlePolicy(action="report"))
    Kit(registry_policy=5.0)
    Kit(registry_policy=RegistryPolicy(lease_ttl=5.0, snapshot=False))
    Kit(heartbeat="10")  # type: ignore[arg-type]
    Kit(2.0)  # type: ignore[call-arg]
    Kit(timeot=2.0)  # type: ignore[arg-type]
    RetryPolicy(retry_on="UNAVAILABLE", max_attempts="3")  # type: ignore[arg-type]


def options_of_calls() -> None:
    with call_options(timeout=timedelta(seconds=2), retry=None, idempotent=True):
        pass
    call_options(timout=2.0)  # type: ignore[call-arg]
    call_options(timeout="2")  # type: ignore[arg-type]


def at_work(mine: grpc.Channel) -> None:
    with Kit(timeout=2.0) as kit:
        assert_type(kit, Kit)
        assert_type(kit.intercept_channel(mine), grpc.Channel)
        grpc.intercept_channel(mine, *kit.client_interceptors())
        servers = kit.server_interceptors()
        assert_type(servers, list[grpc.ServerInterceptor])
        grpc.server(ThreadPoolExecutor(), interceptors=servers)
        assert_type(kit.policy_for("/shop.Orders/Get"), MethodPolicy)
        assert_type(kit.pending, int)
        assert_type(kit.stats(), dict[str, FailbackStats])
        assert_type(kit.entries(), dict[str, list[QueueEntry]])
        assert_type(kit.channel("orders:50051", grpc.ssl_channel_credentials()), grpc.Channel)
        assert_type(kit.heartbeats, tuple[Heartbeat, ...])
        server = grpc.server(ThreadPoolExecutor(), options=kit.server_options())
        assert_type(kit.detect_idle(server, 50051), IdleConnectionDetector)
        assert_type(kit.detect_idle(server).connections(), list[Connection])
        assert_type(kit.detectors, tuple[IdleConnectionDetector, ...])
        assert_type(kit.channel("etcd://a/shop.Orders", lb_policy="least_request"), grpc.Channel)
        serving = kit.serve(server, publish="etcd://a", service="shop.Orders", port=50051)
        with serving as published:
            assert_type(published, Publisher)
        kit.serve(server, publish="etcd://a", port=1, lameduck=1)  # type: ignore[call-arg]
        kit.server_options(keepalive="10s")  # type: ignore[arg-type]
        assert_type(kit.flush(1.0), bool)
        assert_type(kit.close(drain_timeout=1.0), list[FailedCall])


async def at_work_on_a_loop(mine: grpc.aio.Channel) -> None:
    async with aio.Kit(timeout=2.0) as kit:
        assert_type(kit, aio.Kit)
        assert_type(kit.intercept_channel(mine), grpc.aio.Channel)
        grpc.aio.insecure_channel("shop", interceptors=kit.client_interceptors())
        servers = kit.server_interceptors()
        assert_type(servers, list[grpc.aio.ServerInterceptor])
        server = grpc.aio.server(interceptors=servers)
        assert_type(kit.channel("orders:50051", interceptors=[]), grpc.aio.Channel)
        assert_type(kit.detect_idle(server), aio_idle.IdleConnectionDetector)
        assert_type(await kit.detect_idle(server).connections(), list[Connection])
        assert_type(kit.detectors, tuple[aio_idle.IdleConnectionDetector, ...])
        async with kit.serve(server, publish="etcd://a", service="shop", port=1) as published:
            assert_type(published, aio.Publisher)
        assert_type(await kit.flush(1.0), bool)
        assert_type(await kit.close(drain_timeout=1.0), list[FailedCall])
