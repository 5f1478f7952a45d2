"""Why a wait was in vain: the error says what came in between."""

import threading

import pytest

from fixtures.registry_worlds import POLICY, instance
from rpcwheel.errors import NotPublished, RegistryClosed, RegistryUnavailable
from rpcwheel.registry.sync import FailbackRegistry


@pytest.fixture
def registry(provider):
    registry = FailbackRegistry(provider, policy=POLICY.changed(snapshot=False))
    yield registry
    provider.up()
    registry.close()


def soon(act):
    threading.Timer(0.1, act).start()


def test_one_that_was_closed_meanwhile_was_closed(registry, provider):
    provider.down()
    soon(registry.close)
    with pytest.raises(RegistryClosed, match=r"was closed before shop\.Orders/10\.0\.0\.1:1"):
        registry.register(instance(), wait=20)


def test_what_was_unregistered_meanwhile_is_not_tried_on(registry, provider):
    provider.down()
    soon(lambda: registry.unregister(instance()))
    with pytest.raises(NotPublished, match="unregistered meanwhile"):
        registry.register(instance(), wait=20)


def test_what_was_registered_again_meanwhile_is_not_withdrawn(registry, provider):
    registry.register(instance(), wait=5)
    provider.down()
    soon(lambda: registry.register(instance()))
    with pytest.raises(RegistryUnavailable, match="registered again meanwhile"):
        registry.unregister(instance(), wait=20)


def test_a_record_of_a_run_before_is_no_matter_for_ours(registry):
    ours = registry.register(instance(), wait=5)
    registry.unregister(instance(epoch="before"), wait=5)
    assert ours.state == "PUBLISHED"
    assert registry.lookup("shop.Orders").instances == (instance(),)
