"""The demo with Prometheus: its counters are equal to what the demo and its servers counted."""

import json
import os
import re
import shutil
import subprocess
import sys

from prometheus_client.parser import text_string_to_metric_families

from fixtures.processes import PACKAGE, LineProgram
from fixtures.programs import ROOT
from fixtures.prometheus import HTTP, Prometheus, needs_prometheus
from fixtures.waiting import WAIT_S, wait_until

DEPLOY = ROOT / "deploy"
QUEUE = "demo.Demo.run.<locals>.push"

PROGRAM = f"""
import io, json, logging, sys, tempfile, types
from pathlib import Path
import demo, demo_process, grpc
from prometheus_client import REGISTRY
from rich.console import Console
from rpcwheel import Kit

demo.ANSWER_LIMIT_S = demo.DRAIN_LIMIT_S = demo.HOLD_LIMIT_S = demo.TIMEOUT_S = {WAIT_S}
demo_process.START_TIMEOUT_S = {WAIT_S}
queue = {{"queue": "{QUEUE}"}}
during_outage = []

class Demo(demo.Demo):
    def _call_while_down(self, count, outage):
        super()._call_while_down(count, outage)
        during_outage.append(REGISTRY.get_sample_value("rpcwheel_failback_pending", queue))

logging.getLogger("rpcwheel").propagate = False
kit = Kit(status_port=0)

def insecure_channel(target, options):
    return kit.intercept_channel(grpc.insecure_channel(target, options=options))

demo.grpc = types.SimpleNamespace(**(vars(grpc) | {{"insecure_channel": insecure_channel}}))
print(kit.status_address, flush=True)
sys.stdin.readline()
with tempfile.TemporaryDirectory() as directory:
    shown = Demo(20, 0.2, Path(directory), Console(file=io.StringIO()))
    shown.run()
    failed = [check.claim for check in demo.checks(shown) if not check.passed]
results = [call.result for call in shown.calls]
print(json.dumps({{
    "failed": failed,
    "calls": len(results),
    "responses": results.count("response"),
    "queued": results.count("queued"),
    "delivered": shown.delivered,
    "attempts": shown.attempts,
    "peaks": [outage.sizes[-1] for outage in shown.outages if outage.sizes],
    "during_outage": during_outage,
}}), flush=True)
sys.stdin.read()
kit.close()
"""


class Demo(LineProgram):
    """The demo in a process that serves its metrics. It begins with `run`."""

    def __init__(self, directory):
        super().__init__(
            [sys.executable, "-W", "error", "-c", PROGRAM],
            directory / "demo.log",
            start_s=4 * WAIT_S,
            PYTHONPATH=f"{PACKAGE}{os.pathsep}{ROOT / 'examples'}",
        )
        self.target = self.answer()

    def run(self):
        """Run it; return what it counted."""
        return json.loads(self.ask(""))

    def metrics(self):
        """What Prometheus would get."""
        with HTTP.open(f"http://{self.target}/metrics", timeout=WAIT_S) as answer:
            return answer.read().decode()


def expected_of(counted):
    """What selected metrics must be, from what the demo counted."""
    queue = f'queue="{QUEUE}"'
    push = 'grpc_type="unary",grpc_service="shop.Audit",grpc_method="Push"'
    calls = counted["calls"] + counted["attempts"]  # those of callers, and those of failback
    answered = counted["responses"] + counted["delivered"]
    failed = counted["attempts"] - counted["delivered"]
    return {
        f"rpcwheel_failback_queued_total{{{queue}}}": counted["queued"],
        f"rpcwheel_failback_delivered_total{{{queue}}}": counted["delivered"],
        f"rpcwheel_failback_delivery_seconds_count{{{queue}}}": counted["delivered"],
        f"rpcwheel_failback_attempts_failed_total{{{queue}}}": failed,
        f"grpc_client_started_total{{{push}}}": calls,
        f'grpc_client_handled_total{{{push},grpc_code="OK"}}': answered,
        f'grpc_client_handled_total{{{push},grpc_code="UNAVAILABLE"}}': calls - answered,
        f"grpc_client_handling_seconds_count{{{push}}}": calls,
        f"grpc_client_attempt_started_total{{{push}}}": calls,
        f'grpc_client_attempt_duration_seconds_count{{{push},grpc_code="OK"}}': answered,
    }


def selected(text, selector):
    """The value of a series in an exposition; None if there is none."""
    name, _, matchers = selector.partition("{")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
    values = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if (sample.name, sample.labels) == (name, labels)
    ]
    return values[0] if values else None


def test_the_metrics_of_the_demo_are_what_it_counted(tmp_path):
    with Demo(tmp_path) as demo:
        counted = demo.run()
        text = demo.metrics()
    assert counted["failed"] == []
    assert counted["during_outage"] == counted["peaks"]
    expected = expected_of(counted)
    assert min(expected.values()) > 0
    assert {selector: selected(text, selector) for selector in expected} == expected
    for name in ("gave_up", "dropped", "lost", "dead_letters_failed"):
        assert not selected(text, f'rpcwheel_failback_{name}_total{{queue="{QUEUE}"}}')
    if shutil.which("promtool"):
        run = subprocess.run(
            ["promtool", "check", "metrics"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (run.returncode, run.stdout + run.stderr) == (0, "")


@needs_prometheus
def test_prometheus_has_what_the_demo_counted(tmp_path):
    with Demo(tmp_path) as demo, Prometheus(tmp_path, demo.target) as prometheus:
        counted = demo.run()
        expected = expected_of(counted)

        def scraped():
            """The values of the expected series; None if there is not exactly one."""
            found = {selector: prometheus.query(selector) for selector in expected}
            return {
                selector: one[0][1] if len(one) == 1 else None for selector, one in found.items()
            }

        wait_until(lambda: scraped() == expected)

        panels = json.loads((DEPLOY / "grafana" / "rpcwheel.json").read_text())["panels"]
        variables = {"$__rate_interval": "5m", "$job": "shop", "$instance": demo.target}

        def panels_with_data():
            shown = set()
            for panel in panels:
                for target in panel.get("targets", ()):
                    expression = target["expr"]
                    for name, value in variables.items():
                        expression = expression.replace(name, value)
                    if prometheus.query(expression):
                        shown.add(panel["title"])
            return shown

        titles = {"Attempts per call", "Failed calls", "Queued and delivered", "Lateness"}
        wait_until(lambda: titles <= panels_with_data())

        def health_of_alerts():
            groups = prometheus.get("rules")["groups"]
            return {rule["health"] for group in groups for rule in group["rules"]}

        wait_until(lambda: health_of_alerts() == {"ok"})
