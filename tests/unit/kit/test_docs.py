"""The documents list every setting with its default, and every event; their examples work."""

import ast
import logging
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import rpcwheel.balancer.policy  # noqa: F401 - it has policies
from rpcwheel import DeadlinePolicy, events
from rpcwheel.backoff import JitteredWait
from rpcwheel.call import CallPolicy
from rpcwheel.events import rate_limit
from rpcwheel.failback import worker
from rpcwheel.journal import sqlite, url
from rpcwheel.kit import KitPolicy
from rpcwheel.kit.config import policy_from_env
from rpcwheel.limit import adaptive
from rpcwheel.metrics import table
from rpcwheel.policy import Policy
from rpcwheel.status import server
from rpcwheel.telemetry import call_counts

ROOT = Path(__file__).parents[3]
PAGE = ROOT.joinpath("docs", "policies.md").read_text()
EVENTS = ROOT.joinpath("docs", "events.md").read_text()


def block(heading: str) -> str:
    """The first block of code under a heading."""
    return re.search(rf"^## {heading}$.*?^```\w*\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]


def test_the_example_variables_have_their_documented_meaning(file):
    environ = dict(line.split("=", 1) for line in block("The environment").splitlines())
    environ["RPCWHEEL_CONFIG"] = str(file(block("A file")))
    policy = policy_from_env(environ=environ)
    assert policy.timeout == DeadlinePolicy(timeout=5.0, slow_call_threshold=2.5)
    assert (policy.retry.retry_on, policy.retry.max_attempts) == ({"UNAVAILABLE"}, 4)
    assert policy.retry.backoff == JitteredWait(initial=0.1, max=5.0)
    assert policy.policy_for("/shop.Audit/Push").failback is None
    assert policy.policy_for("/shop.Audit/Push").timeout.timeout == 0.5


NOT_ON_THE_PAGE = {
    "MethodPolicy",  # its settings are those of a `CallPolicy`
    "ServiceInstance",  # what a server publishes, not a setting
    "_Exponential",  # the table of a wait, described in the section "Backoff"
}


def policies(kind=Policy):
    """All policies of the package, by name."""
    for each in kind.__subclasses__():
        if each.__module__.startswith("rpcwheel."):
            yield each.__name__, each
            yield from policies(each)


def test_each_setting_is_documented_with_its_default():
    kinds, sections = dict(policies()), re.findall(r"^## `(\w+)`$", PAGE, re.MULTILINE)
    assert kinds.keys() - set(sections) == NOT_ON_THE_PAGE
    assert [line for name in sections for line in missing_or_wrong(kinds[name])] == []


def missing_or_wrong(kind):
    """The settings whose row on the page is missing, superfluous or has another default."""
    section = re.search(rf"^## `{kind.__name__}`$(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)[1]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE))
    inherited = CallPolicy.model_fields if kind is KitPolicy else ()
    for name in set(rows) ^ (set(kind.model_fields) - set(inherited)):
        yield f"{kind.__name__}.{name}"
    for name, cell in rows.items():
        field = kind.model_fields[name]
        if field.is_required():
            right = cell == "required"
        elif "initial" in cell:
            table = ast.literal_eval(cell.strip("`"))
            right = field.get_default() == JitteredWait(**table)
        elif "frozenset" in cell:  # its order differs
            codes = ast.literal_eval(cell.strip("` ").removeprefix("frozenset(")[:-1])
            right = field.get_default() == codes
        else:
            default = field.get_default(call_default_factory=True)
            is_plain = isinstance(default, Policy) and default == type(default)()
            shown = f"{type(default).__name__}()" if is_plain else repr(default)
            right = cell.replace('"', "'") == f"`{shown}`"
        if not right:
            yield f"{kind.__name__}.{name}: {cell}"


def test_each_event_is_documented_with_its_logger_level_and_fields():
    said = {}
    for logger, rows in re.findall(
        r"^## [^\n]*`(rpcwheel\.\w+)`\n(.*?)(?=^## |\Z)", EVENTS, re.DOTALL | re.MULTILINE
    ):
        for name, level, listed in re.findall(
            r"^\| `(\w+)` \| (\w+) \| .* \| (.*) \|$", rows, re.MULTILINE
        ):
            said[name] = logger, level, re.findall(r"\w+", listed)
    shown = {name: getattr(events, name) for name in events.__all__}
    kinds = {name: kind for name, kind in shown.items() if is_dataclass(kind)}
    assert set(said) == set(kinds)
    for name, kind in kinds.items():
        line = kind.log_line
        level = logging.getLevelName(line.level).lower()
        assert said[name] == (kind.logger.name, level, [field.name for field in fields(kind)])


def test_the_readme_links_each_page():
    readme = (ROOT / "README.md").read_text()
    pages = ("policies", "registries", "semantics", "events", "grpcio")
    assert [page for page in pages if f"(docs/{page}.md)" not in readme] == []


# Limits and costs


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("events.md", f"At most {rate_limit.MAX_SUBJECTS:,} subjects of an event class"),
        ("observability.md", f"At most {call_counts.MAX_METHODS} methods are counted"),
        ("observability.md", f"has at most {table.MAX_SERIES:,} combinations of labels"),
        ("observability.md", f"At most {server.MAX_CONNECTIONS} requests are served at a time"),
        ("observability.md", f"a client has {server.TIMEOUT_S:g} seconds to send its request"),
        ("guides/overload.md", f"the adaptive limit is {adaptive.INITIAL_LIMIT} at first"),
        ("guides/journals.md", f"within the lease of {url.DEFAULT_LEASE_S:g} s"),
        ("guides/journals.md", f"for at most {url.DEFAULT_TIMEOUT_S:g} s until its call is stored"),
        ("guides/journals.md", f"after {sqlite.BUSY_SHARE * url.DEFAULT_TIMEOUT_S:g} s `Journal"),
        ("guides/journals.md", f"if the journal fails for {worker.ONCE_FAILURE_S:g} s"),
    ],
)
def test_a_guide_has_the_limits_of_the_code(page, text):
    assert text in " ".join(ROOT.joinpath("docs", page).read_text("utf-8").split())


BENCHMARK = ROOT.joinpath("docs", "benchmarks", "calls.md").read_text()
COSTS = ROOT.joinpath("docs", "is-it-for-me.md").read_text()


def cpu_of_a_call(heading: str, subject: str) -> str:
    """The first figure of a subject under a heading of the benchmark."""
    section = BENCHMARK.partition(f"\n## {heading}\n")[2]
    return re.search(rf"^\| {re.escape(subject)} +\| +([\d.]+)", section, re.MULTILINE)[1]


@pytest.mark.parametrize(
    ("row", "heading", "kit"),
    [
        ("client, `grpc`, `kit.intercept_channel()`", "Client, `grpc`", "kit.intercept_channel()"),
        ("client, `grpc`, `kit.channel()`", "Client, `grpc`", "kit.channel()"),
        (
            "client, `grpc.aio`, `kit.intercept_channel()`",
            "Client, `grpc.aio`",
            "kit.intercept_channel()",
        ),
        ("client, `grpc.aio`, `kit.channel()`", "Client, `grpc.aio`", "kit.channel()"),
        ("server, `grpc`", "Server, `grpc`", "whole Kit"),
        ("server, `grpc.aio`", "Server, `grpc.aio`", "whole Kit"),
    ],
)
def test_the_costs_of_a_call_are_those_of_the_benchmark(row, heading, kit):
    subjects = ("bare", "one no-op interceptor", f"rpcwheel: {kit}")
    figures = [cpu_of_a_call(heading, subject) for subject in subjects]
    assert f"| {row} | {' | '.join(figures)} |" in COSTS
