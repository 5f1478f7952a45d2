"""The benchmark's measurements give figures of the right shape; how big, no test asks."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # behind the installed rpcwheel: the benchmarks are not installed

from benchmarks.timer import calls, firing, idle, million, plot, report, stalls, threads  # noqa: E402
from benchmarks.timer.netty import _rows as netty_rows  # noqa: E402
from benchmarks.timer.runner import STEPS, SUBJECTS, Skipped, _groups  # noqa: E402
from benchmarks.timer.scale import TINY, Results, Row  # noqa: E402
from benchmarks.timer.subjects import (  # noqa: E402
    ASYNC,
    ASYNC_TURNING,
    ASYNCIO,
    ASYNCIO_TURNING,
    NETTY,
    OWN,
    QUEUES,
    RIVALS,
    SCHED,
    THREADING,
    available,
)
from benchmarks.timer.tables import figure, table  # noqa: E402
from benchmarks.timer.verdict import TARGETS  # noqa: E402

NAMES = (*QUEUES, ASYNC, ASYNCIO, SCHED, THREADING)


def figures(rows: list[Row], measure: str) -> dict[str, dict[str, float]]:
    found = {row.subject: row.values for row in rows if row.measure == measure}
    assert all(math.isfinite(value) for values in found.values() for value in values.values())
    return found


def test_calls_cost_something_for_every_subject():
    rows = calls.measure((*NAMES, ASYNC_TURNING, ASYNCIO_TURNING), TINY)
    assert set(figures(rows, "pair")) == {*NAMES, ASYNC_TURNING, ASYNCIO_TURNING}
    assert set(figures(rows, "start")) == set(figures(rows, "cancel")) == set(NAMES)
    assert set(figures(rows, "varied")) == {*QUEUES, ASYNC}
    assert all(row.values["cpu_ns"] > 0 for row in rows)


def test_a_million_is_weighed_collected_and_compared_with_a_thousand():
    rows = million.measure(("HierarchicalWheel",), TINY)
    assert set(figures(rows, "gc")) == set(figures(rows, "flat")) == {"HierarchicalWheel"}
    assert [row.pending for row in rows if row.measure == "flat"] == [TINY.few, TINY.many]


@pytest.mark.parametrize("name", ["SparseWheel", ASYNCIO])
def test_the_longest_call_of_each_kind_is_found_with_and_without_the_collector(name):
    rows = stalls.measure((name,), TINY)
    assert [row.measure for row in rows] == ["stall", "stall, gc on"]
    kinds = {
        f"{call}_{clock}_us" for call in ("start", "cancel", "advance") for clock in ("cpu", "wall")
    }
    assert all(set(row.values) == kinds for row in rows)


def test_all_that_is_due_is_fired_by_every_subject():
    assert set(figures(firing.fire((ASYNC, ASYNCIO, SCHED), TINY), "fire")) == {
        ASYNC,
        ASYNCIO,
        SCHED,
    }


def test_lateness_is_never_negative_in_a_wheel():
    found = figures(firing.lateness(("HierarchicalWheel",), TINY), "lateness")["HierarchicalWheel"]
    assert 0 <= found["least_us"] <= found["p50_us"] <= found["p99_us"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system doesn't count sleeps")
def test_idle_tells_wake_ups_and_cpu_time():
    assert set(figures(idle.measure(("HierarchicalWheel",), TINY), "idle")) == {"HierarchicalWheel"}


def test_what_four_threads_do_is_all_counted():
    found = figures(threads.measure(("HierarchicalWheel", SCHED), TINY), "threads")
    assert found["HierarchicalWheel"]["exact"] == 1.0
    assert found[SCHED]["pairs_per_s"] > 0


def test_netty_tells_what_its_caller_pays_and_adds_what_its_worker_does():
    (row,) = netty_rows("1000 pair 80.0 70.0 20.0\n1000 pair 90.0 72.0 22.0\n")
    assert (row.measure, row.subject, row.pending) == ("pair", NETTY, 1000)
    assert row.values == {"wall_ns": 85.0, "caller_ns": 71.0, "cpu_ns": 92.0}


def test_each_measurement_has_its_subjects_and_asyncio_stands_beside_both_forms():
    assert set(SUBJECTS) == set(STEPS.values())
    assert set(available((*OWN, *RIVALS))) == set(_groups("calls", "native", ["native", "pure"])[0])
    assert ASYNCIO in _groups("fire", "pure", ["native", "pure"])[0]
    assert all(name in QUEUES for (name,) in _groups("stall", "pure", ["native", "pure"]))


def test_the_child_prints_rows_as_json():
    command = [sys.executable, "-m", "benchmarks.timer.child", "threads", "tiny", "SparseWheel"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    assert [Row(**row).subject for row in json.loads(told)] == ["SparseWheel"]


def made_up(own_ns: float = 100.0) -> Results:
    """A run in which only the pairs of ours and of asyncio were measured."""
    values = {"HierarchicalWheel": own_ns, ASYNCIO: 1500.0}
    return Results(
        tuple(
            Row("pair", name, "native", TINY.few, {"cpu_ns": taken, "wall_ns": taken})
            for name, taken in values.items()
        )
    )


def test_a_target_says_met_or_missed_or_not_measured():
    verdicts = [target.verdict(made_up(), TINY) for target in TARGETS]
    assert verdicts[0][1:] == ("15×", "≥ 10×", "met")
    assert {verdict[-1] for verdict in verdicts[1:]} == {"not measured"}
    assert TARGETS[0].verdict(made_up(own_ns=200.0), TINY)[-1] == "**missed**"


def test_the_page_has_the_targets_the_figures_and_what_was_left_out():
    skipped = [Skipped("Netty", "java not found")]
    page = report.page(
        made_up(), TINY, facts={"Python": "any"}, skipped=skipped, command="me", plot="timer.svg"
    )
    lines = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    assert any("15×" in line and "met" in line for line in lines)
    assert ["", "asyncio", "1,500", "1", ""] in lines
    assert "Not measured: Netty (java not found)." in page
    assert "](timer.svg)" in page


def test_the_plot_takes_what_there_is():
    found = [panel.get(ASYNCIO, "native") for panel in plot.panels(made_up(), TINY)]
    assert found == [1500.0, None, None, None]


def test_a_table_is_aligned_and_figures_have_three_digits():
    assert table(("", "x"), [("a", "1"), ("long", "22")]).splitlines() == [
        "|      |  x |",
        "| :--- | -: |",
        "| a    |  1 |",
        "| long | 22 |",
    ]
    assert [figure(value) for value in (None, 0.12345, 99.94, 1234.5)] == [
        "–",
        "0.123",
        "99.9",
        "1,234",
    ]
