"""Fixtures of the tests of `rpcwheel.call`."""

from fixtures.forgotten_logs import forget_the_log  # noqa: F401
from fixtures.shop import aio_shop_channel, shop, shop_channel  # noqa: F401
