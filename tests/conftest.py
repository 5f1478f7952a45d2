"""Only the fixture families, and what the header says of this run."""

import grpc

from rpcwheel.timer.queue import FORM

pytest_plugins = ["fixtures.happenings", "fixtures.leaks", "fixtures.properties"]


def pytest_report_header() -> str:
    return f"rpcwheel: {FORM} wheel, grpcio {grpc.__version__}"
