"""Fixtures of the canaries."""

from fixtures.raw_http2 import open_channel, raw_server, serve  # noqa: F401 - fixtures
from fixtures.shop import aio_shop_channel, shop, shop_channel  # noqa: F401 - fixtures
