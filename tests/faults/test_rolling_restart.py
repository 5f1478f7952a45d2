"""The server and the restart script of `deploy` as programs: no call fails in a restart."""

import contextlib
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from ruamel.yaml import YAML

from fixtures.fault_worlds import Load
from fixtures.ports import free_port
from fixtures.processes import PACKAGE
from fixtures.prometheus import HTTP
from fixtures.waiting import START_S, WAIT_S, wait_until
from rpcwheel.balancer import BalancerPolicy

DEPLOY = Path(__file__).parents[2] / "deploy"
WHO = "/shop.Orders/Who"
TOKEN = "0123456789abcdef"

SYSTEMCTL = """#!/bin/sh
exec "$PYTHON" -c '
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as systemd:
    systemd.sendall((" ".join(sys.argv[2:]) + "\\n").encode())
    sys.exit(int(systemd.makefile().readline()))
' "$SYSTEMD_PORT" "$@"
"""


def environment_of_the_unit(name):
    """The environment of an instance of the systemd unit."""
    unit = (DEPLOY / "systemd" / "shop@.service").read_text()
    settings = " ".join(re.findall(r"^Environment=(.*)", unit, re.MULTILINE))
    return dict(one.split("=") for one in settings.replace("%i", name).split())


def environment_of_the_pod():
    """The environment of a container in Kubernetes."""
    manifests = YAML(typ="safe").load_all((DEPLOY / "kubernetes" / "shop.yaml").read_text())
    (deployment,) = (one for one in manifests if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one.get("value", TOKEN) for one in container["env"]}


class Instance:
    """A process of deploy/shop.py."""

    def __init__(self, environment):
        self._environment = {
            **os.environ,
            **environment,
            "SHOP_LAME_DUCK": "600",  # ended by a second signal
            "PYTHONPATH": str(PACKAGE),
        }
        self.id = environment.get("SHOP_ID", "")
        self.process = None

    def start(self):
        """Start it; return when it tells systemd that it is ready."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as from_program:
            from_program.bind("")  # Linux selects an abstract address
            from_program.settimeout(START_S)
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", str(DEPLOY / "shop.py")],
                env=self._environment
                | {"NOTIFY_SOCKET": from_program.getsockname().decode().replace("\0", "@", 1)},
                process_group=0,
            )
            assert from_program.recv(100) == b"READY=1"

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Systemd(socketserver.ThreadingTCPServer):
    """Answers the program `systemctl` of the script: `is-active` and `restart`."""

    daemon_threads = True

    def __init__(self, directory, units, restart):
        super().__init__(("127.0.0.1", 0), socketserver.StreamRequestHandler)
        self.units, self.restart = units, restart
        self.restarted = []
        program = directory / "systemctl"
        program.write_text(SYSTEMCTL)
        program.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "SYSTEMD_PORT": str(self.server_address[1]),
        }
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def finish_request(self, request, client_address):
        with request.makefile("rw") as stream:
            command, *_, name = stream.readline().split()
            stream.write(f"{self.answer(command, name)}\n")

    def answer(self, command, name):
        if command == "is-active":
            return 0 if name in self.units else 3
        self.restarted.append(name)
        return self.restart(self.units[name])

    def script(self, *names):
        """Run the script; return its exit status and what it prints."""
        run = subprocess.run(
            [str(DEPLOY / "systemd" / "rolling-restart"), *names],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=4 * WAIT_S,
            check=False,
        )
        return run.returncode, run.stdout + run.stderr

    def server_close(self):  # at the end of a with block
        self.shutdown()
        super().server_close()


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")


@linux
def test_no_call_fails_while_all_instances_are_restarted_in_turn(tmp_path):
    url = f"sqlite://{tmp_path}/registry.db"
    units = {
        f"shop@{number}": Instance(
            environment_of_the_unit(number) | {"SHOP_REGISTRY": url, "RPCWHEEL_STATUS_PORT": "0"}
        )
        for number in "12"
    }
    with contextlib.ExitStack() as stack:
        for one in units.values():
            stack.callback(one.close)
            one.start()
        policy = BalancerPolicy(pick_timeout=WAIT_S)
        url = f"{url}?service=shop.Orders"
        load = stack.enter_context(Load.by_name(url, threads=2, balancer_policy=policy))
        assert load.wait_for_answers_of(b"%H-1", b"%H-2")

        def restart(instance):
            instance.process.send_signal(signal.SIGTERM)
            others = (one for one in units.values() if one is not instance)
            assert load.wait_for_answers_of(*(one.id.encode() for one in others))
            instance.process.send_signal(signal.SIGTERM)
            if (status := instance.process.wait(WAIT_S)) == 0:
                instance.start()
            return status

        systemd = stack.enter_context(Systemd(tmp_path, units, restart))
        status, printed = systemd.script(*units)
        assert (status, printed) == (0, "shop@1: restarted\nshop@2: restarted\n")
        assert load.wait_for_answers_of(b"%H-1", b"%H-2")
    assert load.failures == []
    assert systemd.restarted == ["shop@1", "shop@2"]


@linux
def test_a_pod_that_is_stopped_serves_and_is_not_ready_until_the_lame_duck_is_over():
    port, metrics_port = free_port(), free_port()
    settings = {"SHOP_PORT": str(port), "RPCWHEEL_STATUS_PORT": str(metrics_port)}
    pod = Instance(environment_of_the_pod() | settings)
    with contextlib.closing(pod), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        pod.start()
        check, who = HealthStub(channel).Check, channel.unary_unary(WHO)
        assert check(HealthCheckRequest(), timeout=WAIT_S).status == HealthCheckResponse.SERVING
        assert who(b"", timeout=WAIT_S)
        request = urllib.request.Request(f"http://127.0.0.1:{metrics_port}/metrics")
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with HTTP.open(request, timeout=WAIT_S) as answer:
            began = rb'\ngrpc_server_started_total{[^}]*grpc_method="Who"[^}]*} 1.0'
            assert re.search(began, answer.read())
        pod.process.send_signal(signal.SIGTERM)
        wait_until(
            lambda: (
                check(HealthCheckRequest(), timeout=WAIT_S).status
                == HealthCheckResponse.NOT_SERVING
            )
        )
        assert who(b"", timeout=WAIT_S)
        pod.process.send_signal(signal.SIGTERM)
        assert pod.process.wait(WAIT_S) == 0


def test_the_script_stops_at_an_instance_that_does_not_run_or_start(tmp_path):
    units = {"shop@1": 0, "shop@2": 1, "shop@3": 0}
    with Systemd(tmp_path, units, restart=lambda status: status) as systemd:
        status, printed = systemd.script("shop@1", "shop@2", "shop@3")
        assert (status, systemd.restarted) == (1, ["shop@1", "shop@2"])
        assert "shop@2 was not restarted; see: journalctl -u shop@2" in printed
        status, printed = systemd.script("shop@1", "shop@4")
        assert (status, systemd.restarted) == (1, ["shop@1", "shop@2"])
        assert "shop@4 does not run; start it first. shop@1 was not restarted" in printed


def test_the_script_refuses_to_restart_a_single_instance(tmp_path):
    with Systemd(tmp_path, {"shop@1": 0}, restart=lambda status: status) as systemd:
        status, printed = systemd.script("shop@1")
    assert (status, systemd.restarted) == (2, [])
    assert "with one instance, calls fail during its restart" in printed
