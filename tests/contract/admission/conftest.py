"""Fixtures of the tests of admission."""

from fixtures.clients import client  # noqa: F401
from fixtures.forgotten_logs import forget_the_log  # noqa: F401
from fixtures.shop import shop  # noqa: F401
from fixtures.worlds import world  # noqa: F401
