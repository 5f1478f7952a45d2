"""What this room's tests share: channels that share nothing, and peers that only speak frames."""

from fixtures.proxy import open_proxy  # noqa: F401 - a fixture
from fixtures.raw_http2 import open_channel, raw_server, serve  # noqa: F401 - fixtures
