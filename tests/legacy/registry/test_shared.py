"""Those of one URL have one registry together."""

import gc
import os

import pytest

from fixtures.waiting import aio_wait_until, wait_until
from rpcwheel import aio
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.resolved_channel import insecure_channel
from rpcwheel.registry.resolver import SESSIONS, SharedRegistries


def test_a_registry_is_made_once_and_is_to_be_closed_by_the_last():
    shared = SharedRegistries()
    one = shared.acquire("a", object)
    assert shared.acquire("a", object) is one
    assert shared.acquire("b", object) is not one
    assert len(shared) == 2
    assert not shared.release("a", one)
    assert shared.release("a", one)
    assert not shared.release("a", one)
    assert shared.acquire("a", object) is not one


def test_of_what_could_not_be_made_nothing_is_kept():
    shared = SharedRegistries()
    with pytest.raises(ZeroDivisionError):
        shared.acquire("a", lambda: 1 / 0)
    assert len(shared) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_shares_nothing_with_its_parent():
    shared = SharedRegistries()
    one = shared.acquire("a", object)
    child = os.fork()
    if not child:
        forgotten = not shared.release("a", one) and shared.acquire("a", object) is not one
        os._exit(0 if forgotten else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared.release("a", one)


@pytest.fixture
def none_stays_open():
    yield
    gc.collect()
    assert wait_until(lambda: len(SESSIONS) == 0)


@pytest.mark.usefixtures("none_stays_open")
def test_channels_by_one_url_share_a_session_until_the_last_is_closed_or_dropped(memory):
    one, other = (
        insecure_channel(f"{memory}/shop.Orders"),
        insecure_channel(f"{memory}/shop.Audit?group=blue"),
    )
    assert len(SESSIONS) == 1
    apart = insecure_channel(
        f"{memory}/shop.Orders", registry_policy=RegistryPolicy(lease_ttl=20.0)
    )
    assert len(SESSIONS) == 2
    apart.close()
    one.close()
    one.close()
    assert len(SESSIONS) == 1
    del other


@pytest.mark.usefixtures("none_stays_open")
async def test_channels_of_both_worlds_share_a_session_until_the_last_is_closed_or_dropped(memory):
    one, other, blocking = (
        aio.insecure_channel(f"{memory}/shop.Orders"),
        aio.insecure_channel(f"{memory}/shop.Audit"),
        insecure_channel(f"{memory}/shop.Orders"),
    )
    assert len(SESSIONS) == 1
    await one.close()
    await one.close()
    blocking.close()
    assert len(SESSIONS) == 1
    del other
    gc.collect()
    await aio_wait_until(lambda: len(SESSIONS) == 0)
