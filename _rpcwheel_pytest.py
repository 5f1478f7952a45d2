"""The pytest plugin of rpcwheel: fixtures for tests of programs that use it.

pytest imports this module in every run of every project that has rpcwheel installed. Therefore it
is outside the package, and imports neither rpcwheel nor grpc until a test uses a fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.testing import FlakyServer, RecordedEvents
    from rpcwheel.timer import ManualTimer


@pytest.fixture
def manual_timer() -> Iterator[ManualTimer]:
    """A `rpcwheel.timer.ManualTimer`, stopped after the test."""
    from rpcwheel.timer import ManualTimer

    with ManualTimer() as timer:
        yield timer


@pytest.fixture
def rpcwheel_events() -> Iterator[RecordedEvents]:
    """The events that rpcwheel emits during the test: a list with the method `of`."""
    from rpcwheel.testing import RecordedEvents

    with RecordedEvents() as events:
        yield events


@pytest.fixture
def flaky_server() -> Iterator[FlakyServer]:
    """A gRPC server on the loopback that fails on command: a `rpcwheel.testing.FlakyServer`."""
    from rpcwheel.testing import FlakyServer

    with FlakyServer() as server:
        yield server


@pytest.fixture
def no_waits() -> Iterator[None]:
    """Make the waits of retries and failback immediate: `rpcwheel.testing.no_waits`."""
    from rpcwheel import testing

    with testing.no_waits():
        yield
