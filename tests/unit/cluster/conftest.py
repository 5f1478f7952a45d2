"""What this room's tests share: servers to call, and channels of many members over them."""

from fixtures.aio_clusters import aio_cluster  # noqa: F401
from fixtures.certificates import certificates  # noqa: F401 - fixtures
from fixtures.clusters import dead, open_cluster, shops  # noqa: F401
