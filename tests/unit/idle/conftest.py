"""What these tests share: a threaded server with a table of its connections."""

from fixtures.idle_server import channel, server  # noqa: F401 - fixtures
