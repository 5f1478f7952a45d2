"""Dashboard, alerts and runbooks name metrics and labels that exist, and promtool accepts them.

promtool reads PromQL; names are found in its text by regular expressions.
"""

import json
import re
import shutil
import subprocess
import tomllib

import grpc
import pytest
from ruamel.yaml import YAML

from fixtures.programs import ROOT
from rpcwheel.admission import BreakerState
from rpcwheel.limit.limiter import RefusalReason
from rpcwheel.metrics.table import METHOD, METRICS
from rpcwheel.registry.reconciler import RegistrationState
from rpcwheel.rpc import Criticality

DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNBOOKS = f"{PROJECT['urls']['Repository']}/blob/main/docs/operations/runbooks.md"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed"
)


def queries(document):
    """The lines of the PromQL blocks of a document, each once."""
    blocks = re.findall(r"^```promql\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    return sorted({line for block in blocks for line in block.splitlines()})


def read_yaml(path):
    return YAML(typ="safe").load(path.read_text())


DASHBOARD = json.loads((DEPLOY / "grafana" / "rpcwheel.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
ALERTS = [
    rule for group in read_yaml(PROMETHEUS / "alerts.yml")["groups"] for rule in group["rules"]
]

QUERIES = queries(ROOT / "docs" / "operations" / "runbooks.md")

EXPRESSIONS = [
    *(target["expr"] for _, target in TARGETS),
    *(alert["expr"] for alert in ALERTS),
    *QUERIES,
]

TARGET_LABELS = {"instance", "job"}
"""Labels that Prometheus adds."""

METHOD_LABELS = ("grpc_service", "grpc_method")

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}

LABELS = {"up": TARGET_LABELS} | {
    metric.name + suffix: TARGET_LABELS.union(
        *(
            ("grpc_service", "grpc_method") if label == METHOD else (label,)
            for label in metric.labels
        ),
        ("le",) if suffix == "_bucket" else (),
    )
    for metric in METRICS
    for suffix in SUFFIXES[metric.kind]
}
"""The labels of each series, by name."""

SELECTOR = re.compile(r"\b(up|(?:rpcwheel|grpc_(?:client|server))_\w+)\b(?:{([^}]*)})?")
MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')


def selectors(text):
    """The series of an expression, each with its conditions: `(label, value)`."""
    return [(series, MATCHER.findall(conditions)) for series, conditions in SELECTOR.findall(text)]


def grouped_by(text):
    """The labels of each `by` and `on`."""
    return [set(re.findall(r"\w+", names)) for names in re.findall(r"\b(?:by|on) \((.*?)\)", text)]


def test_expressions_use_metrics_labels_codes_and_states_that_exist():
    known = {
        "criticality": {criticality.label for criticality in Criticality},
        "grpc_code": {code.name for code in grpc.StatusCode},
        "reason": {refusal.label for refusal in RefusalReason},
        "state": {state.name for state in grpc.ChannelConnectivity}
        | {state.value for state in BreakerState}
        | {state.value for state in RegistrationState}
        | {"unhealthy", "waiting", "taken", "dead"},
    }
    for text in EXPRESSIONS:
        for series, conditions in selectors(text):
            for names in grouped_by(text):
                assert names <= LABELS[series], text
            for label, value in conditions:
                assert label in LABELS[series], text
                assert label not in known or set(value.split("|")) <= known[label], text


def test_panels_select_the_targets_and_show_the_labels_of_their_result():
    for title, target in TARGETS:
        result = grouped_by(target["expr"])[0] - {"le"}
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == result, title
        for _, conditions in selectors(target["expr"]):
            assert {("job", "$job"), ("instance", "$instance")} <= set(conditions), title


def test_the_dashboard_shows_each_metric():
    shown = {name for _, target in TARGETS for name, _ in selectors(target["expr"])}
    names = {re.sub("_(total|bucket|count|sum)$", "", name) for name in shown}
    assert names == {metric.name for metric in METRICS}


def test_the_variables_of_the_dashboard_are_the_source_and_the_targets_of_prometheus():
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    for name in TARGET_LABELS:
        (selector,) = re.fullmatch(
            rf"label_values\((.*), {name}\)", variables[name]["query"]["query"]
        ).groups()
        assert [series in LABELS for series, _ in selectors(selector)] == [True]


def test_the_panels_are_distinct_and_do_not_overlap():
    """Grafana moves panels that overlap, and ignores one of two with the same id."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_alerts_say_what_to_do_with_labels_of_their_result():
    for alert in ALERTS:
        name, texts = alert["alert"], alert["annotations"]
        assert alert["labels"]["severity"] in {"critical", "warning"}, name
        assert set(texts) == {"summary", "description", "runbook_url"}, name
        assert texts["runbook_url"] == f"{RUNBOOKS}#{name.lower()}"
        labels = set(re.findall(r"\$labels\.(\w+)", str(texts)))
        assert labels <= grouped_by(alert["expr"])[0], name


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts(command):
    promtool(*command)


def promtool(*command, directory=PROMETHEUS):
    run = subprocess.run(
        ["promtool", *command], cwd=directory, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_each_alert_is_tested():
    tests = read_yaml(PROMETHEUS / "alerts_test.yml")["tests"]
    fires = {
        found[1]
        for test in tests
        for one in test["promql_expr_test"]
        for sample in one.get("exp_samples", ())
        if (found := re.search(r'alertname="(\w+)"', sample["labels"]))
    }
    assert fires == {alert["alert"] for alert in ALERTS}


@needs_promtool
def test_promtool_accepts_the_expressions_of_the_dashboard_and_of_the_runbooks(tmp_path):
    texts = [*(target["expr"] for _, target in TARGETS), *QUERIES]
    rules = [
        {"record": f"text_{number}", "expr": text.replace("$__rate_interval", "1m")}
        for number, text in enumerate(texts)
    ]
    document = {"groups": [{"name": "texts", "rules": rules}]}
    (tmp_path / "rules.yml").write_text(json.dumps(document))  # JSON is YAML
    promtool("check", "rules", "rules.yml", directory=tmp_path)
