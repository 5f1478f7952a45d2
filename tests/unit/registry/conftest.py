"""Fixtures of the registry's unit tests."""

from fixtures.flaky_backends import backend  # noqa: F401 - a fixture
