"""Fixtures of pending calls."""

from fixtures.pending_worlds import world  # noqa: F401 - a fixture
