"""Fixtures of the tests with other libraries and languages."""

from fixtures.callers import open_caller  # noqa: F401 - fixtures
from fixtures.certificates import certificates  # noqa: F401 - a fixture
from fixtures.foreign_servers import go_binary, go_shop  # noqa: F401
from fixtures.http_proxies import open_proxy  # noqa: F401 - a fixture
from fixtures.shop import shop  # noqa: F401
from fixtures.worlds import world  # noqa: F401
