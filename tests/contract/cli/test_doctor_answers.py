"""What the doctor says of answers that change, or that are made to deceive."""

import contextlib
import struct
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.doctors import QUICK
from fixtures.listeners import says
from rpcwheel.cli import main
from rpcwheel.cli.http2 import Frame, Kind


def checking(*answers):
    """A handler of health checks that gives these, the last again and again."""
    left = list(answers)

    def check(request, context):
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, bytes):
            return answer
        return context.abort(*answer)

    return check


@pytest.fixture
def health_of():
    """Starts a server whose health checks are answered so; gives its address."""
    with contextlib.ExitStack() as stack:

        def start(*answers):
            pool = stack.enter_context(ThreadPoolExecutor(2))
            server = grpc.server(pool)
            handler = grpc.unary_unary_rpc_method_handler(checking(*answers))
            server.add_generic_rpc_handlers(
                [grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})]
            )
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            stack.callback(lambda: server.stop(None).wait())
            return f"127.0.0.1:{port}"

        yield start


SERVING = b"\x08\x01"


def test_health_checks_that_do_not_agree_are_not_timed_as_one(doctor, health_of):
    target = health_of(SERVING, SERVING, (grpc.StatusCode.UNAVAILABLE, "only twice"))
    status, found = doctor(target, "--samples", "5")
    assert status == 0
    assert found["call"]["samples"] == 1


def test_health_checks_that_do_not_agree_are_told(capsys, health_of):
    target = health_of(SERVING, (grpc.StatusCode.UNAVAILABLE, "only once"))
    main(["doctor", target, *QUICK])
    said = capsys.readouterr().out
    assert "warn  call       after 0 of 2 health checks another answer" in said
    assert "only once" in said
    assert said.endswith("healthy, with 1 warning.\n")


def test_a_service_that_was_asked_for_by_name_and_could_not_be_is_not_healthy(doctor, http2_target):
    status, found = doctor(http2_target, "--service", "shop.Orders")
    assert status == 1
    assert "no health service to ask for 'shop.Orders'" in found["health"]["said"]


def test_what_a_server_says_makes_no_lines_and_no_colours(capsys, health_of):
    forged = "\x1b[2J\nok    health     the server is SERVING"
    main(["doctor", health_of((grpc.StatusCode.INTERNAL, forged)), *QUICK])
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\nok    health" not in said
    assert "\\x1b[2J\\nok" in said


def test_one_that_says_goaway_at_once_is_told_so(doctor, listen):
    frame = Frame(Kind.GOAWAY, struct.pack(">II", 0, 0) + b"going").encoded()
    status, found = doctor(listen(says(frame)).target)
    assert (status, found["http2"]["level"]) == (1, "fail")
    assert "ends the connection as it begins: GOAWAY NO_ERROR ('going')" in found["http2"]["said"]


@pytest.fixture
def http2_target():
    """A server of grpc that serves nothing."""
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()
