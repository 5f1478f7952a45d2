"""Each alert has a runbook, which names commands, options, events and classes that exist."""

import re
import shlex

from ruamel.yaml import YAML
from typer.main import get_command

import rpcwheel
from fixtures.programs import ROOT
from rpcwheel import errors, events, failback, timer
from rpcwheel.cli.app import app

TEXT = (ROOT / "docs" / "operations" / "runbooks.md").read_text()
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE))
RULES = YAML(typ="safe").load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}

PARTS = ("What users see.", "Confirm.", "What to do now.", "How to prevent it.")

BLOCKS = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = sorted(
    {line for block in BLOCKS for line in block.splitlines() if line.startswith("rpcwheel ")}
    | {text for text in re.findall(r"`(rpcwheel [^`]+)`", TEXT) if not text.endswith("...")}
)


def test_each_alert_has_a_section_in_the_order_of_the_rules():
    assert list(SECTIONS) == list(ALERTS)


def test_sections_have_the_severity_of_their_alert_and_all_parts():
    for name, section in SECTIONS.items():
        assert section.startswith(f"\n**{ALERTS[name]['labels']['severity']}.** "), name
        parts = re.findall(r"^\*\*([A-Z].+?)\*\*", section, re.MULTILINE)
        assert parts == list(PARTS), name
        assert "```promql\n" in section, name


def test_commands_have_arguments_and_options_that_exist():
    for text in COMMANDS:
        _, *words = shlex.split(text.replace(" ID", " 17"))
        command = get_command(app)
        while hasattr(command, "commands"):
            name, *words = words
            command = command.get_command(None, name)
        if words:
            command.make_context(command.name, words)  # its error names the option


def test_names_of_classes_are_events_alerts_and_public_names():
    words = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)(?:\(.*?\))?`", TEXT))
    modules = (rpcwheel, events, errors, failback, timer)
    public = {name for module in modules for name in dir(module)}
    assert words - public - set(ALERTS) - {"ThreadPoolExecutor"} == set()
