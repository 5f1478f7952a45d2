"""The benchmark of calls gives figures of the right shape; how big, no test asks."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # behind the installed rpcwheel: the benchmarks are not installed

from benchmarks.calls import report, subjects  # noqa: E402
from benchmarks.calls.scale import BOTH, MEASURES, RESPONSES, TINY, UNARY, Results, Row  # noqa: E402
from benchmarks.calls.subjects import (  # noqa: E402
    BARE,
    GRPC_INTERCEPTOR,
    KIT,
    KIT_CHANNEL,
    KIT_SILENCE,
    NOOP,
    NOOP_TIMEOUT,
    OTEL,
    TIMEOUT_S,
    Skipped,
    callers,
    measures,
)
from benchmarks.calls.turns import take_turns  # noqa: E402
from benchmarks.calls.verdict import TARGETS  # noqa: E402
from benchmarks.timer.clock import Cost  # noqa: E402

SIDES = [(side, world) for side in ("client", "server") for world in ("sync", "aio")]


@pytest.mark.parametrize(("side", "world"), SIDES)
def test_every_subject_makes_every_kind_of_call_and_its_cost_is_told(side, world):
    command = [sys.executable, "-m", "benchmarks.calls.child", side, world, "tiny"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=100).stdout
    rows = [Row(**row) for row in json.loads(told)]
    wanted = {(what, name) for what in measures(side) for name, _ in callers(side, world, what)}
    assert {(row.measure, row.subject) for row in rows} == wanted
    assert {(row.side, row.world) for row in rows} == {(side, world)}
    for row in rows:
        assert all(math.isfinite(value) and value > 0 for value in row.values.values())


def test_ours_is_among_those_that_are_measured():
    assert {KIT, KIT_SILENCE} <= {name for name, _ in callers("client", "sync", RESPONSES)}
    assert {KIT, KIT_CHANNEL} <= {name for name, _ in callers("client", "aio", UNARY)}
    assert KIT in {name for name, _ in callers("server", "sync", BOTH)}


def test_only_who_shall_have_a_timeout_from_its_caller_has_one():
    clients = dict(callers("client", "sync", UNARY))
    assert {name for name, timeout in clients.items() if timeout} == {NOOP_TIMEOUT}
    assert {timeout for _, timeout in callers("server", "aio", UNARY)} == {TIMEOUT_S}
    assert KIT_SILENCE not in clients  # has nothing to watch there


def test_who_is_not_installed_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(subjects, "find_spec", lambda _: None)
    assert subjects.missing() == {
        GRPC_INTERCEPTOR: "grpc_interceptor is not installed",
        OTEL: "opentelemetry.instrumentation.grpc is not installed",
    }
    assert not {GRPC_INTERCEPTOR, OTEL} & set(subjects.subjects("client", "sync"))


def test_ratios_are_of_the_same_round_and_all_take_part_in_each():
    costs = {NOOP: iter([100.0, 1000.0, 200.0]), BARE: iter([90.0, 900.0, 100.0])}

    def burst(name):
        return lambda: Cost(taken := next(costs[name]), taken)

    taken = take_turns({name: burst(name) for name in costs}, rounds=3, warm_up=0)
    bare, noop = (row.values for row in sorted(taken.rows("client", "sync", UNARY), key=str))
    assert (bare["cpu_us"], noop["cpu_us"]) == (0.1, 0.2)
    assert bare["cpu_ratio"] == 0.9  # not 0.5, the ratio of the medians
    assert (bare["wall_ratio_q1"], bare["wall_ratio_q3"]) == (0.7, 0.9)


def made_up(kit_ratio: float) -> Results:
    """A run in which only unary calls of the sync client were measured."""
    ratios = {NOOP: 1.0, KIT: kit_ratio}
    keys = [f"{clock}_ratio{part}" for clock in ("cpu", "wall") for part in ("", "_q1", "_q3")]
    return Results(
        tuple(
            Row(
                "client",
                "sync",
                UNARY,
                name,
                {"cpu_us": 200 * ratio, "wall_us": 400 * ratio} | dict.fromkeys(keys, ratio),
            )
            for name, ratio in ratios.items()
        )
    )


def test_a_target_says_met_or_missed_or_not_measured():
    verdicts = [target.verdict(made_up(1.05)) for target in TARGETS]
    assert verdicts[0][1:] == ("1.050×", "≤ 1.10×", "met")
    assert {verdict[-1] for verdict in verdicts[2:]} == {"not measured"}
    assert TARGETS[0].verdict(made_up(1.11))[-1] == "**missed**"


def test_the_page_has_the_targets_the_figures_and_what_was_left_out():
    skipped = [Skipped(OTEL, "not installed")]
    page = report.page(made_up(1.05), TINY, facts={"Python": "any"}, skipped=skipped, command="me")
    lines = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    assert ["", KIT, "210", "1.05", "(1.05–1.05)", "420", "1.05", "(1.05–1.05)", ""] in lines
    assert any("1.050×" in line and "met" in line for line in lines)
    assert "Not measured: OpenTelemetry (not installed)." in page
    assert "## Client, `grpc`\n" in page
    assert "## Server" not in page


def test_each_kind_of_call_is_measured_on_the_client():
    assert measures("client") == MEASURES
