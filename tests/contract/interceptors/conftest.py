"""Fixtures of the tests of interceptors."""

from fixtures.aio_channels import channels, make, own  # noqa: F401
from fixtures.call_counts import call_counts  # noqa: F401
from fixtures.clients import client, queues  # noqa: F401
from fixtures.forgotten_logs import forget_the_log  # noqa: F401
from fixtures.shop import shop, shop_channel  # noqa: F401
from fixtures.shops import memory  # noqa: F401
from fixtures.worlds import world  # noqa: F401
