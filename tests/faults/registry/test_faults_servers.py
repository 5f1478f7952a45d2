"""Published servers that are restarted in order, killed and frozen, under clients that call."""

import contextlib

import grpc

import rpcwheel
from fixtures.fault_worlds import KINDS, Load, running
from fixtures.ports import free_port
from fixtures.serving_process import ServingProcess
from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import RegistryPolicy, open_registry

POLICY = RegistryPolicy(lease_ttl=2.0, timeout=WAIT_S / 3, snapshot=False)
SLOW = b"1.6"
"""Seconds that a call takes: more than a server waits for its clients to hear of its end."""


def test_a_rolling_restart_under_load_fails_no_call(tmp_path, start_serving):
    worlds = ["sync", "aio"]
    with running("etcd", tmp_path) as engine:
        old = [start_serving(engine.url(), world=world) for world in worlds]
        pids = {server.pid for server in old}
        new = []
        url = engine.url(SERVICE)
        with (
            Load.by_name(url, threads=3, registry_policy=POLICY) as calls,
            rpcwheel.insecure_channel(url, registry_policy=POLICY) as by_name,
        ):
            assert calls.wait_for_answers_of(*pids)
            for server, world in zip(old, worlds, strict=True):
                slow = [by_name.unary_unary(WHO).future(SLOW, timeout=WAIT_S) for _ in range(6)]
                assert server.end() == 0
                assert all(one.result() for one in slow)
                pids.remove(server.pid)
                assert calls.wait_for_answers_of(*pids)
                new.append(start_serving(engine.url(), world=world))
                pids.add(new[-1].pid)
                assert calls.wait_for_answers_of(*pids)
        assert calls.failures == []


def test_a_killed_server_is_not_called_until_it_accepts_connections(tmp_path, start_serving):
    port = free_port()
    with running("sqlite", tmp_path) as engine:
        stays, dies = start_serving(engine.url()), start_serving(engine.url(), port=port)
        assert {stays.port, dies.port} == {stays.port, port}
        with (
            Load.by_name(engine.url(SERVICE), threads=3, registry_policy=POLICY) as calls,
            open_registry(engine.url(), registry_policy=POLICY) as one,
        ):
            assert calls.wait_for_answers_of(stays.pid, dies.pid)
            dies.kill()
            calls.ends_what_is_on_its_way()
            on_their_way = list(calls.failures)
            assert len(on_their_way) <= 4  # each of the callers had one call in flight
            assert {error.code() for error in on_their_way} <= {grpc.StatusCode.UNAVAILABLE}
            calls.failures.clear()
            assert calls.wait_for_answers_of(stays.pid)
            known = {each.port for each in one.lookup(SERVICE).instances}
            assert known == {stays.port, port}  # its lease has not ended
            again = start_serving("memory://", port=port)  # the registry does not hear of it
            assert calls.wait_for_answers_of(stays.pid, again.pid)
        assert calls.failures == []


def test_a_frozen_or_killed_server_is_gone_from_each_registry_after_its_lease(tmp_path):
    with contextlib.ExitStack() as opened:
        engines = [
            opened.enter_context(running(name, tmp_path))
            for name, kind in KINDS.items()
            if not kind.available()
        ]
        urls = [engine.url() for engine in engines]
        server = opened.enter_context(ServingProcess(*urls, lease=2.0))
        policy = POLICY.replace(stale_timeout=0.5)
        registries = [
            opened.enter_context(open_registry(url, registry_policy=policy)) for url in urls
        ]
        subscriptions = [each.subscribe(SERVICE) for each in registries[::2]]  # the others ask

        def known():
            return [len(each.lookup(SERVICE).instances) for each in registries]

        assert server.port
        assert wait_until(lambda: known() == [1] * len(urls))
        server.stop()
        assert wait_until(lambda: known() == [0] * len(urls))
        server.cont()
        assert wait_until(lambda: known() == [1] * len(urls))
        server.kill()
        assert wait_until(lambda: known() == [0] * len(urls))
        assert wait_until(lambda: {each.snapshot.source for each in subscriptions} == {"live"})
