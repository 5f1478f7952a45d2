"""What the tests of the command line share: what a doctor may find at a port."""

from fixtures.listeners import listen  # noqa: F401 - a fixture
