"""The findings and the exit status of `rpcwheel doctor`, on real listeners."""

import json
import re
import socket
import threading
import time

import grpc
import pytest
from hyperframe.frame import GoAwayFrame, HeadersFrame

from fixtures.doctors import QUICK
from fixtures.grpc_servers import unary_service
from fixtures.listeners import CHECK, answers, closes, greeted, http2_answering, says, silent
from fixtures.ports import free_port, has_ipv6
from fixtures.waiting import WAIT_S, Gate
from rpcwheel.cli import main

# Nothing listens


def test_a_closed_port_is_connection_refused(doctor):
    status, found = doctor(f"127.0.0.1:{free_port()}")
    assert (status, list(found)) == (1, ["name", "tcp"])
    assert "refused" in found["tcp"]["message"]
    assert "start the server" in found["tcp"]["advice"]


def test_an_unknown_name_is_found(doctor):
    status, found = doctor("no-such-host.invalid:50051")
    assert (status, list(found)) == (1, ["name"])
    assert "no-such-host.invalid" in found["name"]["message"]


def test_a_host_that_does_not_answer_is_found_after_the_timeout(doctor):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:  # the kernel drops what comes when the queue is full
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        for limit in LIMITS:
            status, found = doctor(f"127.0.0.1:{full.getsockname()[1]}", "--timeout", limit)
            if "tcp" in found:  # it had its address in time
                break
        for one in waiting:
            one.close()
    assert status == 1
    assert found["tcp"]["message"].endswith(f"no answer within {limit} s")
    assert "firewalls" in found["tcp"]["advice"]


# Another protocol


def test_other_protocols_and_refusals_are_recognized(doctor, listen):
    goaway = GoAwayFrame(error_code=0, additional_data=b"going").serialize()
    for talk, message in [
        (
            says(b"SSH-2.0-OpenSSH_9.6\r\n"),
            "this is SSH ('SSH-2.0-OpenSSH_9.6'), not a gRPC server",
        ),
        (answers(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "HTTP/1.1 server answers"),
        (says(b"hello, who are you?"), "the server does not speak HTTP/2, it sends 'hello, who"),
        (closes, "and closes it at once"),
        (lambda _: None, "and closes it at once"),
        (says(goaway), "refuses the connection: GOAWAY NO_ERROR ('going')"),
    ]:
        status, found = doctor(listen(talk).target)
        assert (status, list(found)) == (1, ["name", "tcp", "http2"])
        assert found["http2"]["level"] == "fail"
        assert message in found["http2"]["message"]
        assert found["http2"]["advice"]


LIMITS = ("0.5", "8")
"""For `--timeout` where it is the subject: on a machine that stands still the first may have passed
before the doctor came to the step that it is to end."""


def test_a_silent_server_is_found_after_the_timeout(doctor, listen):
    heard = threading.Event()

    def listens(sock):
        sock.recv(1, socket.MSG_PEEK)
        heard.set()
        silent(sock)

    target = listen(listens).target
    for limit in LIMITS:
        status, found = doctor(target, "--timeout", limit)
        if heard.is_set():
            break
    assert (status, list(found)) == (1, ["name", "tcp", "http2"])
    assert f"sends nothing for {limit} s" in found["http2"]["message"]


def test_a_server_that_fails_at_times_is_a_warning_with_the_samples_until_then(doctor, listen):
    left = [http2_answering(b"200")] * 4  # for TCP, for the protocol, and two that are measured

    def twice(sock):
        (left.pop() if left else closes)(sock)

    _, found = doctor(listen(twice).target, "--samples", "5")
    assert found["rtt"]["level"] == "warn"
    assert "failed after 2 of 5 connections" in found["rtt"]["message"]
    assert found["ping"]["samples"] == 2


def test_a_proxy_without_a_backend_is_found_by_its_http_status(doctor, listen):
    status, found = doctor(listen(http2_answering(b"503")).target)
    assert (status, found["http2"]["level"]) == (1, "ok")
    assert "HTTP 503 instead of a gRPC response" in found["health"]["message"]


# A gRPC server


def test_a_healthy_server_is_healthy(doctor, health_server):
    server = health_server()
    status, found = doctor(server.target)
    assert status == 0
    assert list(found) == ["name", "tcp", "http2", "connect", "ping", "health", "call"]
    assert found["health"]["message"] == "the server is SERVING"
    for step in ("connect", "ping", "call"):
        times = found[step]["ms"]
        assert 0 < times["min"] <= times["median"] <= times["max"]
        assert found[step]["samples"] == 2


def test_many_round_trips_are_not_too_many_pings_and_the_limit_of_calls_is_reported(
    doctor, health_server
):
    server = health_server(options=[("grpc.max_concurrent_streams", 7)])
    status, found = doctor(server.target, "--samples", "10")
    assert (status, found["ping"]["samples"]) == (0, 10)
    assert "at most 7 concurrent calls" in found["http2"]["message"]
    assert found["http2"]["settings"]["max_concurrent_streams"] == 7


def test_a_server_that_is_not_serving_is_not_healthy(doctor, health_server):
    server = health_server()
    server.set("", "NOT_SERVING")
    server.set("shop.Orders", "SERVING")
    status, found = doctor(server.target)
    assert (status, found["health"]["message"]) == (1, "the server is NOT_SERVING")
    status, found = doctor(server.target, "--service", "shop.Orders")
    assert (status, found["health"]["message"]) == (0, "service 'shop.Orders' is SERVING")


def test_a_server_without_health_service_is_healthy_with_a_note(doctor, serve):
    status, found = doctor(serve())
    assert (status, found["health"]["level"]) == (0, "note")
    assert "grpcio-health-checking" in found["health"]["advice"]
    assert "call" in found


def test_a_handler_that_hangs_is_distinguished_from_a_dead_connection(doctor, health_server):
    server = health_server(service=unary_service(CHECK, gate := Gate()))
    for limit in LIMITS:
        status, found = doctor(server.target, "--timeout", limit)
        if gate.entered.is_set():
            break
    gate.opened.set()
    assert (status, list(found)[-1]) == (1, "health")
    assert "but the connection works" in found["health"]["message"]


@pytest.mark.parametrize("place", ["[::1]:0", "unix:{}/app.sock"], ids=["IPv6", "unix"])
def test_other_families_of_addresses_are_examined(doctor, health_server, tmp_path, place):
    if "::1" in place and not has_ipv6():
        pytest.skip("no IPv6 on the loopback")
    assert doctor(health_server(place=place.format(tmp_path)).target)[0] == 0


def test_one_reachable_address_of_several_is_enough(doctor, health_server, monkeypatch):
    server = health_server()
    real = socket.getaddrinfo

    def both(host, port, *args, **kwargs):
        return [
            *real("127.0.0.2", port, *args, **kwargs),
            *real("127.0.0.1", port, *args, **kwargs),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    status, found = doctor(f"localhost:{server.port}")
    assert (status, found["name"]["message"]) == (0, "localhost resolves to 127.0.0.2, 127.0.0.1")


PROXY = {"http_proxy": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("environment", "is_used"),
    [
        (PROXY | {"no_proxy": "example.org,10.0.0.0/8"}, True),
        (PROXY | {"no_proxy": "127.0.0.0/255.0.0.0,::/0"}, True),
        (PROXY | {"no_proxy": "0.0.1"}, False),
        (PROXY | {"no_proxy": "10.0.0.0/8, 127.0.0.9/8"}, False),
        (PROXY | {"no_proxy": "127.0.0.1", "no_grpc_proxy": ""}, True),
        (PROXY | {"grpc_proxy": ""}, False),
        (PROXY | {"https_proxy": "https://127.0.0.1:1"}, False),
    ],
)
def test_a_proxy_that_grpc_uses_is_a_warning(
    doctor, health_server, monkeypatch, environment, is_used
):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, found = doctor(health_server().target)
    assert status == is_used  # a call through the proxy fails, as nothing listens there
    assert found.get("proxy", {}).get("level") == ("warn" if is_used else None)


# Keepalive


def test_a_default_server_refuses_pings_without_calls(doctor, health_server):
    status, found = doctor(health_server().target, "--keepalive", "0.1")
    assert (status, found["keepalive"]["level"]) == (1, "fail")
    assert "too_many_pings') at ping 4" in found["keepalive"]["message"]
    assert "rpcwheel.options.server_options(permit_every=0.9)" in found["keepalive"]["advice"]


def test_a_server_that_permits_pings_passes_the_keepalive_test(doctor, health_server):
    permitting = [
        ("grpc.http2.min_ping_interval_without_data_ms", 10),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    status, found = doctor(health_server(options=permitting).target, "--keepalive", "0.1")
    assert (status, found["keepalive"]["level"]) == (0, "ok")
    assert "and those of Dubbo's consumers, every 60 s" in found["keepalive"]["message"]


def test_a_graceful_goaway_is_distinguished_from_too_many_pings(doctor, health_server):
    server = health_server(options=[("grpc.max_connection_idle_ms", 300)])
    status, found = doctor(server.target, "--keepalive", "0.4")
    assert (status, found["keepalive"]["level"]) == (0, "warn")
    assert "gracefully" in found["keepalive"]["message"]


def test_a_connection_that_is_cut_between_pings_fails_the_keepalive_test(doctor, listen):
    def cut(sock):
        connection, frame = greeted(sock), None
        while not (connection.pings_received or isinstance(frame, HeadersFrame)):
            frame = connection.receive(time.monotonic() + WAIT_S)
            connection.handle(frame)

    _, found = doctor(listen(cut).target, "--keepalive", "0.5")
    assert found["keepalive"]["level"] == "fail"
    assert re.search(r"and \d pings: the peer closed", found["keepalive"]["message"])


# Results that change, and hostile text


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
def health_of(health_server):
    """Starts a server whose health checks are answered so; gives its address."""
    return lambda *answers: health_server(service=unary_service(CHECK, checking(*answers))).target


SERVING = b"\x08\x01"


def test_only_health_checks_with_the_same_result_are_measured(doctor, health_of):
    target = health_of(SERVING, SERVING, (grpc.StatusCode.UNAVAILABLE, "only twice"))
    status, found = doctor(target, "--samples", "5")
    assert status == 0
    assert found["call"]["samples"] == 1


def test_a_changed_result_of_the_health_check_is_a_warning(capsys, health_of):
    target = health_of(SERVING, (grpc.StatusCode.UNAVAILABLE, "only once"))
    main(["doctor", target, *QUICK])
    said = capsys.readouterr().out
    assert "warn  call       a different result after 0 of 2 health checks" in said
    assert "only once" in said
    assert said.endswith("healthy, with 1 warning.\n")


def test_control_characters_of_a_server_are_escaped(capsys, health_of):
    forged = "\x1b[2J\nok    health     the server is SERVING"
    main(["doctor", health_of((grpc.StatusCode.INTERNAL, forged)), *QUICK])
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\nok    health" not in said
    assert "\\x1b[2J\\nok" in said


# Output and arguments


def test_the_text_output_has_one_line_per_finding(capsys, health_server):
    server = health_server()
    server.set("", "NOT_SERVING")
    assert main(["doctor", server.target, *QUICK, "--keepalive", "0.1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"rpcwheel doctor {server.target}"
    assert "FAIL  health     the server is NOT_SERVING" in lines
    assert "note  keepalive  4 pings without calls, one every 0.1 s; takes 0.3 s" in lines
    assert lines[-1] == "NOT healthy: health, keepalive."


def test_with_json_stderr_has_the_duration(capsys, health_server):
    main(["doctor", health_server().target, *QUICK, "--json", "--keepalive", "0.1"])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["target"].startswith("127.0.0.1:")
    assert captured.err == "4 pings without calls, one every 0.1 s; takes 0.3 s\n"


def test_a_wrong_argument_ends_with_2(monkeypatch, capsys):
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "no-such.pem")
    for arguments, message in [
        (["localhost"], "'localhost' has no port"),
        (["localhost:0"], "from 1 to 65535, not '0'"),
        (["a:1", "--timeout", "0"], "'--timeout': give seconds above zero, and at most 1,000,000"),
        (["a:1", "--timeout", "nan"], "give seconds above zero"),
        (["a:1", "--keepalive", "1e300"], "at most 1,000,000"),
        (["a:1", "--servername", ".foo"], "'.foo' is not a valid server name"),
        (["a:1", "--servername", "a" * 300], "is not a valid server name"),
        (["a:1", "--servername", "ü..x"], "is not a valid server name"),
        (["a:1", "--service", "\udcff"], "is not valid UTF-8"),
        (["a:1", "--samples", "0"], "'--samples'"),
        (["a:1", "--cert", "c.pem"], "--cert and --key must be given together"),
        (["a:1", "--ca", "no-such.pem"], "no-such.pem cannot be used"),
        (["a:1", "--tls"], "$GRPC_DEFAULT_SSL_ROOTS_FILE_PATH cannot be used"),
        ([], "HOST:PORT"),
    ]:
        assert main(["doctor", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
