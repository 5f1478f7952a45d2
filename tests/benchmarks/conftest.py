"""What this room's tests share: what was measured, once for all workers of a run."""

from fixtures.benches import measured  # noqa: F401 - a fixture
