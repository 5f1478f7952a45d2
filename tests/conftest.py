"""Fixtures of all tests, and what holds for the whole run."""

import gc
import signal

import grpc

from rpcwheel.timer.queue import FORM

pytest_plugins = ["fixtures.happenings", "fixtures.leaks", "fixtures.properties"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In the background of a shell. Tests interrupt themselves, and what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"rpcwheel: {FORM} wheel, grpcio {grpc.__version__}"


def pytest_collection_finish() -> None:
    """Keep the collector away from what lasts for the whole run.

    Many tests call `gc.collect()`, which would visit all modules and collected tests each time.
    """
    gc.collect()
    gc.freeze()
