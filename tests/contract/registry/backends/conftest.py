"""What the tests of the engines share."""

from fixtures.engine_watchers import opened, tls_files  # noqa: F401 - fixtures
