"""The resolver of a channel, and registries that several of them share."""

import os

import pytest

from fixtures.forks import held_by_another_thread, holds_in_child
from rpcwheel.resolver.resolver import Resolver, SharedRegistries
from rpcwheel.resolver.target import Target


def test_nothing_is_kept_of_a_registry_that_could_not_be_made():
    shared = SharedRegistries()
    with pytest.raises(ZeroDivisionError):
        shared.acquire("a", lambda: 1 / 0)
    assert len(shared._open) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_does_not_use_the_registries_of_its_parent():
    shared = SharedRegistries()
    registry = shared.acquire("a", object)
    assert holds_in_child(
        lambda: not shared.release("a", registry) and shared.acquire("a", object) is not registry
    )
    assert shared.release("a", registry)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_resolver_can_be_closed_in_a_forked_child():
    target = Target.of("memory://forked/shop.Orders", has_registry=False)
    resolver = Resolver(target, None, None, None, 0)
    with held_by_another_thread(resolver._lock):
        assert holds_in_child(lambda: resolver.close() is None)
    resolver.close()
