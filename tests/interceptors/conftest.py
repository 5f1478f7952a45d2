"""What the tests of the interceptors share."""

import pytest

from fixtures.chains import aio_chain, chain  # noqa: F401 - fixtures
from fixtures.shop import aio_shop_channel, shop, shop_channel  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def forget_the_log(caplog):
    """A logged error keeps the frames of its call, and these keep the sockets of grpc.aio."""
    yield
    caplog.get_records("call").clear()
