"""The queries and commands of the runbooks, in a process in which everything fails."""

import re
import sys

import pytest
from ruamel.yaml import YAML

from fixtures.processes import LineProgram
from fixtures.programs import ROOT, python
from fixtures.prometheus import DEPLOY, Prometheus, needs_prometheus
from fixtures.waiting import WAIT_S, wait_until

TEXT = (ROOT / "docs" / "operations" / "runbooks.md").read_text()
RULES = YAML(typ="safe").load((DEPLOY / "alerts.yml").read_text())
ALERTS = {rule["alert"]: rule["expr"] for group in RULES["groups"] for rule in group["rules"]}

PROGRAM = ROOT / "tests" / "fixtures" / "everything_fails.py"

NOT_HERE = {"up == 0": "the target is up"}
"""Why a query selects nothing, by a part of its text."""

LATER = {
    "TargetDown": "the target is up",
    "FailbackOldCalls": "its threshold is 15 minutes",
    "JournalOldCalls": "its threshold is an hour",
    "RegistryInstancesStale": "its threshold is 5 minutes",
    "RegistryLeaseNotRenewed": "its threshold is 15 s",
    "RpcConnectionsDie": "a connection on which nothing is read is replaced more and more slowly",
    "RpcServerSlow": "its threshold is 1 s",
    "TimerLate": "it depends on the load of the machine",
}
"""Why the expression of an alert is not true."""


class Failing(LineProgram):
    """The process."""

    def __init__(self, directory):
        super().__init__([sys.executable, str(PROGRAM)], directory / "log", start_s=4 * WAIT_S)
        self.target, self.journal, self.registry, self.down = self.answer().split()


def run(*words):
    """The exit status and the output of a command."""
    ended = python("-m", "rpcwheel", *words, COLUMNS="250")
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    with Failing(tmp_path_factory.mktemp("failing")) as process:
        yield process


@needs_prometheus
def test_each_query_selects_something_and_alerts_fire_when_everything_fails(failing, tmp_path):
    blocks = re.findall(r"^```promql\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    lines = {line for block in blocks for line in block.splitlines()}
    waiting = {line for line in lines if not any(part in line for part in NOT_HERE)}
    waiting |= {ALERTS[name] for name in ALERTS.keys() - LATER}
    with Prometheus(tmp_path, failing.target) as prometheus:

        def all_have_selected_something():
            waiting.difference_update([text for text in waiting if prometheus.query(text)])
            return not waiting

        wait_until(all_have_selected_something, timeout=2 * WAIT_S)


def test_top_shows_what_fails(failing):
    tables = ("Failback queues", "Queued calls", "Journals", "Client limits", "Attempts not sent")
    others = ("Refused calls", "Subchannels", "Registered instances", "Timers", "Heartbeats")

    def shows_all():
        status, output = run("top", failing.target, "--once")
        return status == 0 and all(name.upper() in output.upper() for name in tables + others)

    wait_until(shows_all)


@pytest.mark.parametrize(
    ("command", "status", "shown"),
    [
        ("top {down} --once", 1, "does not answer"),
        ("doctor {down}", 1, "NOT healthy"),
        ("registry ls {registry}", 1, "there is no such file"),
        ("journal stats {journal}", 0, "dead"),
        ("journal ls {journal} --state dead", 0, "UNAVAILABLE"),
        ("journal ls {journal} --state waiting --older 0s", 0, "/shop.Audit/Stored"),
        ("journal show {journal} 1", 0, "UNAVAILABLE"),
        ("journal export {journal} --state dead", 0, '"/shop.Audit/Dead"'),
        ("journal retry {journal} --state dead --queue dead --yes", 0, "due now"),
        ("journal work {journal} --target {down} --once", 0, "left"),
        ("journal drop {journal} --queue stored --older 30d --yes", 0, "0 calls dropped"),
    ],
)
def test_a_command_shows_what_its_runbook_says(failing, command, status, shown):
    names = ("target", "journal", "registry", "down")
    words = [
        word.format(**{name: getattr(failing, name) for name in names}) for word in command.split()
    ]

    def is_shown():
        ended, output = run(*words)
        return ended == status and shown in output

    wait_until(is_shown)
