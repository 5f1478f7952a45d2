"""Fixtures of the tests of traces."""

from fixtures.call_counts import call_counts  # noqa: F401 - a fixture
from fixtures.failback_invokers import aio_invoker, invoker  # noqa: F401 - fixtures
from fixtures.foreign_opentelemetry import spans, theirs  # noqa: F401 - fixtures
from fixtures.instrumented_channels import open_channel  # noqa: F401 - a fixture
from fixtures.shop import shop  # noqa: F401 - a fixture
from fixtures.worlds import world  # noqa: F401 - a fixture
