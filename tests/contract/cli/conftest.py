"""Fixtures of the command line: `rpcwheel doctor`, and the servers that it examines."""

import pytest

from fixtures.certificates import certificates  # noqa: F401 - a fixture
from fixtures.doctors import doctor, no_proxy_of_this_machine  # noqa: F401 - fixtures
from fixtures.journals import backend, worker_url  # noqa: F401 - fixtures
from fixtures.listeners import health_server, listen  # noqa: F401 - fixtures
from fixtures.raw_http2 import serve  # noqa: F401 - a fixture
from fixtures.shop import shop  # noqa: F401 - a fixture


@pytest.fixture
def url(tmp_path):
    """The URL of a file for a journal or a registry."""
    return f"sqlite://{tmp_path / 'shop.db'}"
