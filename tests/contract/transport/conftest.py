"""Fixtures of channels: a server, and channels to it in both worlds."""

import pytest

from fixtures.aio_channels import (  # noqa: F401 - fixtures
    aio_balanced,
    channel,
    make,
)
from fixtures.balanced_channels import open_balanced  # noqa: F401
from fixtures.shop import shop  # noqa: F401
from fixtures.waiting import wait_until
from fixtures.worlds import world  # noqa: F401


@pytest.fixture
def open_reconnecting(world, shop, timer):  # noqa: F811
    """Makes channels to the shop with manual time, and closes them after the test."""
    made = []

    def open_one(**given):
        given = {"target": shop.target, "timer": timer} | given
        made.append(world.do(world.module("transport").ReconnectingChannel, **given))
        return made[-1]

    yield open_one
    for one in made:
        world.do(one.close)
    assert wait_until(lambda: timer.pending == 0)


@pytest.fixture
def reconnecting(open_reconnecting):
    """A channel to the shop."""
    return open_reconnecting()
