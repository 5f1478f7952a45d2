"""Fixtures of the backends' tests."""

from fixtures.engine_watchers import opened, tls_files  # noqa: F401 - fixtures
