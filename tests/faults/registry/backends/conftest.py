"""The engines, one of each for a module, and what their tests share."""

import pytest

from fixtures.dubbo_applications import metadata_server  # noqa: F401 - a fixture
from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_redis import RedisEngine
from fixtures.engine_watchers import namespace, opened, tls_files  # noqa: F401 - fixtures
from fixtures.engine_watchers import namespace as root  # noqa: F401 - a fixture
from fixtures.engine_zookeeper import DubboEngine, ZookeeperEngine
from fixtures.engines import engine_fixture

etcd = engine_fixture(EtcdEngine)
redis = engine_fixture(RedisEngine)
zookeeper = engine_fixture(ZookeeperEngine)
dubbo = engine_fixture(DubboEngine)


@pytest.fixture
def make(etcd, opened, namespace):  # noqa: F811 - the fixtures
    """Makes backends of the module's etcd in one namespace, which are closed in the end."""
    return lambda url="": opened(url or etcd.url(namespace=namespace))
