"""What the tests of failback share."""

import functools

import pytest
from scenarios.failback import DEFAULT

from fixtures.failback_queues import Queue
from fixtures.grpc_servers import (  # noqa: F401 - fixtures
    aio_channel,
    aio_grpc_server,
    channel,
    grpc_server,
)
from rpcwheel.failback import FailbackInvoker, FailbackPolicy, aio, with_failback


@pytest.fixture
def invoker(timer):
    """Makes invokers, and closes them in the end."""
    made = []

    def make(**settings):
        settings = {"on": ConnectionError, "default": DEFAULT} | settings
        made.append(FailbackInvoker(FailbackPolicy(**settings), timer=timer))
        return made[-1]

    yield make
    for one in made:
        one.close(drain=0)


@pytest.fixture
async def aio_invoker(timer):
    """Makes invokers, and closes them in the end."""
    made = []

    def make(**settings):
        settings = {"on": ConnectionError, "default": DEFAULT} | settings
        made.append(aio.FailbackInvoker(FailbackPolicy(**settings), timer=timer))
        return made[-1]

    yield make
    for one in made:
        await one.close(drain=0)


@pytest.fixture
def guard(timer):
    """`with_failback` on a manual timer, with a set of errors to try again after."""
    return functools.partial(with_failback, on={ConnectionError, "UNAVAILABLE"}, timer=timer)


@pytest.fixture
def queue(timer):
    """A ledger whose tries are written down, not made."""
    return Queue(timer)
