"""What this room's tests share: servers to call, and channels of many members over them."""

from fixtures.certificates import certificates  # noqa: F401 - fixtures
from fixtures.clusters import dead, open_cluster, shops  # noqa: F401
