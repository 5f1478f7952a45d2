"""Fixtures and settings of all tests."""

import asyncio
import gc
import os
import signal

import grpc
import pytest

from fixtures.event_loops import uvloop
from rpcwheel.telemetry import components
from rpcwheel.timer.queue import FORM

pytest_plugins = ["fixtures.timer_and_events", "fixtures.leaks", "fixtures.properties"]

gc.disable()  # until all tests are collected: half of the time would go into visiting their parts

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores SIGINT in background jobs, but tests interrupt themselves and their processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)


if os.environ.get("TEST_LOOP") == "uvloop":  # all event loops of the tests
    asyncio.new_event_loop = asyncio.events.new_event_loop = uvloop.new_event_loop


def pytest_sessionstart() -> None:
    """Switch metrics and traces on, which otherwise the first component of any test would do."""
    components.start()


def pytest_report_header() -> str:
    return f"rpcwheel: {FORM} wheel, grpcio {grpc.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests: at the end, the other workers would wait for them."""
    longest = {"test_package.py", "test_documents.py"}
    items.sort(key=lambda item: ("test_the_site" not in item.name, item.path.name not in longest))


def pytest_collection_finish() -> None:
    """Exclude objects that exist for the whole run from garbage collection.

    Many tests call `gc.collect()`, which would visit all modules and collected tests each time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
