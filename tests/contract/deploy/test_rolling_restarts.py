"""The numbers of the examples for Kubernetes and systemd fit each other."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rpcwheel.kit.config import policy_from_env
from rpcwheel.publisher import publisher
from rpcwheel.registry import RegistryPolicy
from rpcwheel.registry.url import parse_url

DEPLOY = Path(__file__).parents[3] / "deploy"
UNIT = DEPLOY / "systemd" / "shop@.service"

STOP_S = (
    publisher.WITHDRAW_TIMEOUT_S
    + publisher.HEALTH_TIMEOUT_S
    + publisher.STOP_MARGIN_S
    + publisher.CLOSE_TIMEOUT_S
)
"""What a graceful stop may take without the lame duck and the grace."""

DNS_CACHE_S = 30.0
"""How long CoreDNS caches in its default configuration."""

JITTER = 1.1
"""Of the interval of headless://."""


OBJECTS = {
    document["kind"]: document
    for document in YAML(typ="safe").load_all((DEPLOY / "kubernetes" / "shop.yaml").read_text())
}
"""The objects of the Kubernetes manifest, by kind."""

DEPLOYMENT = OBJECTS["Deployment"]["spec"]
POD = DEPLOYMENT["template"]["spec"]
(CONTAINER,) = POD["containers"]
TOKEN = "0123456789abcdef"


ENVIRONMENT = {one["name"]: one.get("value", TOKEN) for one in CONTAINER["env"]}


def unit():
    """The settings of the systemd unit, and its environment."""
    settings = re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE)
    environment = " ".join(value for name, value in settings if name == "Environment")
    return dict(settings), dict(one.split("=") for one in environment.split())


def learn_s():
    """What clients need at most to learn of a change: the URL of the README, by way of DNS."""
    (url,) = set(re.findall(r"headless://[^`\s]+", (DEPLOY / "README.md").read_text()))
    return parse_url(url).seconds("interval", default=30.0) * JITTER + DNS_CACHE_S


def test_the_documents_say_how_long_a_graceful_stop_takes():
    formula = r"(?i)lame_duck \+ (?:shop_)?grace \+ (\d+)"
    for name in ("deploy/README.md", "docs/registries.md", "deploy/kubernetes/shop.yaml", UNIT):
        text = (DEPLOY.parent / name).read_text("utf-8")
        assert re.findall(formula, text) == [f"{STOP_S:g}"], name


def test_kubernetes_allows_a_graceful_stop_its_time():
    stop_s = float(ENVIRONMENT["SHOP_LAME_DUCK"]) + float(ENVIRONMENT["SHOP_GRACE"]) + STOP_S
    assert POD["terminationGracePeriodSeconds"] > stop_s


def test_systemd_allows_a_graceful_stop_its_time():
    settings, environment = unit()
    stop_s = float(environment["SHOP_LAME_DUCK"]) + float(environment["SHOP_GRACE"]) + STOP_S
    assert float(settings["TimeoutStopSec"]) > stop_s
    assert (settings["KillSignal"], settings["Type"]) == ("SIGTERM", "notify")


def test_a_pod_serves_until_clients_have_resolved_its_name_again():
    assert float(ENVIRONMENT["SHOP_LAME_DUCK"]) > learn_s()


def test_a_pod_is_stopped_only_when_clients_know_the_new_one():
    assert DEPLOYMENT["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert DEPLOYMENT["minReadySeconds"] > learn_s()
    assert DEPLOYMENT["minReadySeconds"] > RegistryPolicy().lease_ttl  # self-preservation


def test_the_disruption_budget_leaves_pods_that_serve():
    budget = OBJECTS["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] < DEPLOYMENT["replicas"]
    assert budget["selector"] == DEPLOYMENT["selector"]


def test_the_service_is_headless_and_selects_the_pods():
    service = OBJECTS["Service"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"] == DEPLOYMENT["selector"]["matchLabels"]
    assert service["selector"] == DEPLOYMENT["template"]["metadata"]["labels"]
    (port,) = service["ports"]
    ports = {one["name"]: one["containerPort"] for one in CONTAINER["ports"]}
    # A headless service does not translate ports.
    assert port["port"] == ports[port["targetPort"]] == CONTAINER["readinessProbe"]["grpc"]["port"]
    assert str(port["port"]) == ENVIRONMENT["SHOP_PORT"]


def test_prometheus_finds_the_metrics_of_a_pod_and_has_its_token():
    ports = {one["name"]: str(one["containerPort"]) for one in CONTAINER["ports"]}
    assert ports["metrics"] == ENVIRONMENT["RPCWHEEL_STATUS_PORT"]
    (token,) = (one["valueFrom"] for one in CONTAINER["env"] if "valueFrom" in one)
    monitor = YAML(typ="safe").load((DEPLOY / "kubernetes" / "podmonitor.yaml").read_text())["spec"]
    assert monitor["selector"] == DEPLOYMENT["selector"]
    assert monitor["podMetricsEndpoints"] == [
        {"port": "metrics", "authorization": {"credentials": token["secretKeyRef"]}}
    ]


def test_prometheus_scrapes_the_instances_of_systemd():
    configuration = YAML(typ="safe").load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = configuration["scrape_configs"]
    port = unit()[1]["RPCWHEEL_STATUS_PORT"]
    assert job["static_configs"] == [
        {"targets": [f"127.0.0.1:{port.replace('%i', number)}" for number in "123"]}
    ]


def test_a_server_is_not_killed_because_it_is_not_serving():
    assert not CONTAINER.keys() & {"livenessProbe", "lifecycle"}


def test_the_container_keeps_the_restricted_pod_security_standard():
    assert CONTAINER["securityContext"] == {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert "memory" in CONTAINER["resources"]["limits"]
    # A container that is throttled fires its timeouts late.
    assert "cpu" not in CONTAINER["resources"]["limits"]


def test_the_container_gets_signals_itself():
    lines = (DEPLOY / "kubernetes" / "Dockerfile").read_text().splitlines()
    assert lines[-1] == 'CMD ["python", "/app/shop.py"]'


def test_the_program_accepts_its_environment():
    known = set(re.findall(r"SHOP_\w+", (DEPLOY / "shop.py").read_text()))
    instance = {name: value.replace("%i", "1") for name, value in unit()[1].items()}
    for settings in (ENVIRONMENT, instance):
        policy_from_env(environ=settings)
        assert {name for name in settings if name.startswith("SHOP_")} <= known


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path):
    copy = tmp_path / "shop@.service"
    copy.write_text(UNIT.read_text().replace("/opt/shop/bin/python", sys.executable))
    run = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, [line for line in run.stderr.splitlines() if "shop" in line]) == (0, [])
