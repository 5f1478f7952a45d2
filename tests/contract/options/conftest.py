"""Fixtures of the options tests: channels with their own connections, and HTTP/2 peers."""

from fixtures.proxy import open_proxy  # noqa: F401 - a fixture
from fixtures.raw_http2 import open_channel, serve  # noqa: F401 - fixtures
