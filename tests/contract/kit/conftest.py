"""Fixtures of the contract tests of kits."""

from fixtures.balanced_channels import dead  # noqa: F401 - a fixture
from fixtures.shop import shop, shop_channel  # noqa: F401 - fixtures
from fixtures.shops import make_shop, make_world_shop, memory  # noqa: F401 - fixtures
from fixtures.timer_and_events import events  # noqa: F401 - a fixture
from fixtures.worlds import world  # noqa: F401 - a fixture
