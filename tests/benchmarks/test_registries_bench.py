"""The benchmark of registries gives figures of the right shape; how big, no test asks."""

import math
import sys

import pytest

from fixtures.benches import ROOT

sys.path.append(str(ROOT))  # behind the installed rpcwheel: the benchmarks are not installed

from benchmarks.calls.scale import Results, Row
from benchmarks.calls.subjects import Skipped
from benchmarks.registries import engines, report, runner
from benchmarks.registries.scale import TINY
from benchmarks.registries.subjects import (
    AT_ONCE,
    BARE,
    CALLERS,
    CONVERGE,
    ENGINES,
    FEW,
    GRPC_MANY,
    MANY,
    ONE,
    OURS,
    PICK,
    PICKERS,
    REPUBLISH,
    RIVALS,
    SPREAD,
    UNARY,
    watching,
)
from benchmarks.registries.verdict import TARGETS

HERE = [engine for engine in ENGINES if engines.missing(engine) is None]
WATCHING = [(engine, who) for engine in ENGINES for who in watching(engine)]
BACK = [("memory", AT_ONCE), ("redis", SPREAD)]
JOBS = [
    *(("tiny", "calls", world) for world in ("sync", "aio")),
    *(("tiny", "converge", *each) for each in WATCHING if each[0] in HERE),
    *(("tiny", "republish", *each) for each in BACK if each[0] in HERE),
]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its far side reads /proc")


@pytest.fixture(scope="module")
def rows_of(measured):
    """What a step's process gave; all run once, together."""
    rows = measured("benchmarks.registries.child", JOBS)

    def of(*job: str) -> list[Row]:
        found = [Row(**row) for row in rows[("tiny", *job)]]
        for row in found:
            assert all(math.isfinite(value) and value >= 0 for value in row.values.values())
        return found

    return of


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_every_subject_makes_calls_and_its_cost_is_told(rows_of, world):
    rows = rows_of("calls", world)
    assert {row.subject for row in rows} == set(CALLERS)
    assert {(row.world, row.measure) for row in rows} == {(world, UNARY)}


def test_every_balance_picks_from_few_and_from_many_in_a_process_of_the_runner():
    rows = runner.rows_of("tiny", "picks")
    assert {row.subject for row in rows} == set(PICKERS)
    for row in rows:
        assert {f"ns_{size}" for size in TINY.picked} <= row.values.keys()


@pytest.mark.parametrize(("engine", "who"), WATCHING)
def test_all_subscribers_see_all_instances_and_what_becomes_of_them(rows_of, engine, who):
    if reason := engines.missing(engine):
        pytest.skip(reason)
    (row,) = rows_of("converge", engine, who)
    assert (row.measure, row.subject) == (CONVERGE, f"{engine}: {who}")
    assert row.values["all_s"] > 0
    assert row.values["gone_ms"] > 0
    assert ("change_ms" in row.values) == (who in (OURS, RIVALS["etcd"]))


@pytest.mark.parametrize(("engine", "who"), BACK)
def test_what_was_wiped_comes_back_and_every_arrival_is_counted(rows_of, engine, who):
    if reason := engines.missing(engine):
        pytest.skip(reason)
    (row,) = rows_of("republish", engine, who)
    assert (row.measure, row.subject) == (REPUBLISH, f"{engine}: {who}")
    assert row.values["back"] == TINY.instances
    assert TINY.instances <= row.values["bins"] * row.values["busiest"]
    assert row.values["first_s"] <= row.values["all_s"]


def test_an_engine_that_is_not_installed_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(runner, "missing", lambda name: "gone" if name == "redis" else None)
    monkeypatch.setattr(runner, "rows_of", lambda _, step, *who: [f"{step} of {who[0]}"])
    told = list(runner.run(frozenset({"republish"}), "tiny"))
    assert told[0] == Skipped("redis", "gone")
    assert set(told[1:]) == {"republish of memory", "republish of etcd", "republish of zookeeper"}


def made_up(ratio: float) -> Results:
    """A run in which only unary calls of the sync client were measured."""
    keys = [f"{clock}_ratio{part}" for clock in ("cpu", "wall") for part in ("", "_q1", "_q3")]

    def row(name: str, its: float, us: float) -> Row:
        return Row(
            "client", "sync", UNARY, name, dict.fromkeys(keys, its) | {"cpu_us": us, "wall_us": us}
        )

    return Results(
        (
            row(BARE, 1.0, 100.0),
            row(GRPC_MANY, 1.3, 130.0),
            row(ONE, ratio, 100 * ratio),
            row(FEW, ratio, 100 * ratio),
            row(MANY, 1.3 * ratio, 130 * ratio),
        )
    )


@pytest.mark.parametrize(("ratio", "verdict"), [(1.05, "met"), (1.11, "**missed**")])
def test_a_target_says_met_or_missed_or_not_measured(ratio, verdict):
    sync = [target.verdict(made_up(ratio)) for target in TARGETS if target.world == "sync"]
    assert {told[1:] for told in sync} == {(f"{ratio:.3f}×", "≤ 1.10×", verdict)}
    aio = [target.verdict(made_up(ratio)) for target in TARGETS if target.world == "aio"]
    assert {told[-1] for told in aio} == {"not measured"}


def test_the_page_has_the_targets_the_figures_and_what_was_left_out():
    late = Row("client", "sync", CONVERGE, "redis: late", {"waited_s": 30.0})
    busy = {"busiest": 62, "bins": 21, "first_s": 1.5, "all_s": 3.0}
    back = Row("client", "sync", REPUBLISH, "etcd: spread", busy)
    pick = Row("client", "sync", PICK, PICKERS[0], {"ns_2": 150.0})
    page = report.page(
        Results((*made_up(1.05).rows, late, back, pick)),
        TINY,
        facts={"Python": "any"},
        skipped=[Skipped("redis", "not installed")],
        command="me",
    )
    lines = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    assert ["", ONE, "105", "1.05 (1.05–1.05)", "105", "1.05 (1.05–1.05)", ""] in lines
    assert ["", "redis: late", "> 30", "–", "–", "–", "–", ""] in lines
    assert ["", "etcd: spread", "1.50", "3.00", "62", "21", ""] in lines
    assert ["", PICKERS[0], "150", "–", "–", "–", ""] in lines
    assert "Not measured: redis (not installed)." in page
