"""What the tests of the bridge to grpcio share."""

from fixtures.shop import aio_shop_channel, shop, shop_channel  # noqa: F401 - fixtures
