"""Fixtures of the registry's unit tests."""

from fixtures.registry_worlds import backend  # noqa: F401 - a fixture
