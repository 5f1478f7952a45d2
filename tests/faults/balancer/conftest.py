"""Fixtures of the fault tests of balanced channels."""

from fixtures.happenings import events  # noqa: F401
from fixtures.shops import memory  # noqa: F401
