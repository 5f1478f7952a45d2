"""Fixtures of the tests of `rpcwheel._grpc`."""

from fixtures.shop import aio_shop_channel, shop, shop_channel  # noqa: F401 - fixtures
from fixtures.worlds import world  # noqa: F401
