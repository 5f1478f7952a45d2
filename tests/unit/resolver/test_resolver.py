"""The resolver of a channel."""

from tenacity.wait import wait_base

from fixtures.forks import held_by_another_thread, holds_in_child
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.resolver.resolver import Resolver
from rpcwheel.resolver.target import Target


def test_a_registry_whose_policy_cannot_be_hashed_is_shared_by_channels_with_that_policy():
    class Wait(wait_base):
        __hash__ = None

        def __call__(self, retry_state):
            return 1.0

    target = Target.of("memory://unhashable/shop.Orders", has_registry=False)
    policy, other = (RegistryPolicy(backoff=Wait()) for _ in range(2))
    resolvers = [Resolver(target, None, each, None, 0) for each in (policy, policy, other)]
    first, second, third = (each._registry for each in resolvers)
    assert first is second
    assert first is not third
    for each in resolvers:
        each.close()
    assert first.closed
    assert third.closed


def test_a_resolver_can_be_closed_in_a_forked_child():
    target = Target.of("memory://forked/shop.Orders", has_registry=False)
    resolver = Resolver(target, None, None, None, 0)
    with held_by_another_thread(resolver._lock):
        assert holds_in_child(lambda: resolver.close() is None)
    resolver.close()
