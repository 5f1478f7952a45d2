"""What the tests of the engines share."""

import pytest

from fixtures.engine_watchers import namespace, opened, tls_files  # noqa: F401 - fixtures


@pytest.fixture
def make(etcd, opened, namespace):  # noqa: F811 - the fixtures
    """Makes backends of the module's etcd in one namespace, which are closed in the end."""
    return lambda url="": opened(url or etcd.url(namespace=namespace))
