"""Fixtures of the unit tests of kits."""

from fixtures.worlds import world  # noqa: F401 - a fixture
