"""Channels by name whose servers are cut off from the registry, and restarted in order."""

from fixtures.fault_worlds import Load, World, running
from fixtures.shops import SERVICE
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import BalancerPolicy, RegistryPolicy
from rpcwheel.events import StaleInstancesKept

POLICY = RegistryPolicy(lease_ttl=2.0, timeout=WAIT_S / 3, snapshot=False, jitter=10 * WAIT_S)
"""Of the clients: stale instances have much time to be published again."""


def test_servers_that_are_cut_off_from_the_registry_are_called_as_long_as_they_answer(
    tmp_path, start_serving, events
):
    with running("etcd", tmp_path) as engine:
        world = World(engine, tmp_path)
        dies, stays = servers = [start_serving(world.url(), lease=2.0) for _ in range(2)]
        assert all(one.pid for one in servers)  # they are published
        removed = []
        settings = {
            "registry_policy": POLICY,
            "balancer_policy": BalancerPolicy(health_check_timeout=WAIT_S / 2),
            "on_removed": lambda subchannel: removed.append(subchannel.id),
        }
        with Load.by_name(engine.url(SERVICE), **settings) as load:  # not through the proxy
            assert load.wait_for_answers_of(dies.pid, stays.pid)
            world.fail("cut off")

            def channels_that_kept():
                kept = (event for event in tuple(events) if isinstance(event, StaleInstancesKept))
                return len({id(event) for event in kept})

            assert wait_until(lambda: channels_that_kept() >= 2)
            assert load.wait_for_answers_of(dies.pid, stays.pid)
            removed.clear()  # when the first was cut off, the other was left
            world.end_fault("cut off")
            assert wait_until(lambda: len(world.held(SERVICE)) == 2)
            assert load.wait_for_answers_of(dies.pid, stays.pid)
            assert removed == []  # not even when only one of them was back
            before = channels_that_kept()
            world.fail("cut off")
            assert wait_until(lambda: channels_that_kept() >= before + 2)
            assert load.failures == []
            dies.kill()
            load.ends_what_is_on_its_way()
            load.failures.clear()
            assert load.wait_for_answers_of(stays.pid)
            world.end_fault("cut off")
            assert load.wait_for_answers_of(stays.pid)
            assert load.failures == []
