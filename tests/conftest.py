"""Only the fixture families, and what the header says of this run."""

import signal

import grpc

from rpcwheel.timer.queue import FORM

pytest_plugins = ["fixtures.happenings", "fixtures.leaks", "fixtures.properties"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In the background of a shell. Tests interrupt themselves, and what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"rpcwheel: {FORM} wheel, grpcio {grpc.__version__}"
