"""The benchmark of connections gives figures of the right shape; how big, no test asks."""

import math
import sys
import time
from pathlib import Path

import pytest

from fixtures.benches import ROOT

sys.path.append(str(ROOT))  # behind the installed rpcwheel: the benchmarks are not installed

from benchmarks.calls.scale import Results, Row
from benchmarks.calls.subjects import Skipped
from benchmarks.connections import report, runner
from benchmarks.connections.heartbeats import expected_of
from benchmarks.connections.scale import FULL, SCALES, TINY
from benchmarks.connections.subjects import (
    CALLERS,
    CHURN,
    CHURNED,
    CLOSING,
    DETECTOR,
    EACH,
    FINDERS,
    FROZEN,
    HEARTBEATS,
    KEEPALIVE,
    LOOK,
    OURS,
    PSUTIL,
    RECOVERY,
    REPLACEMENT,
    REPLACERS,
    ROUND,
    SERVERS,
    SERVING,
    SPREAD,
    UNARY,
    UNTOUCHED,
    UNWATCHED,
    WORLDS,
    beating,
    has_psutil,
)
from benchmarks.connections.verdict import TARGETS, each_us, percent

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="it reads what Linux says of processes"
)

LOOKS = {LOOK, CLOSING} | ({PSUTIL} if has_psutil() else set())
STEPS = [
    ("calls", UNARY, set(CALLERS)),
    ("replacing", REPLACEMENT, set(REPLACERS)),
    ("outages", RECOVERY, {*REPLACERS, UNTOUCHED}),
    ("frozen", FROZEN, set(FINDERS)),
    ("serving", SERVING, set(SERVERS)),
    ("rounds", ROUND, LOOKS),
    ("churn", CHURN, set(CHURNED)),
]


RUN = [(*each, world) for each in STEPS for world in WORLDS if (each[0], world) != ("churn", "aio")]
"""As the runner has it."""
BEATING = [
    *(("sync", who) for who in (UNWATCHED, OURS, EACH["sync"])),
    *(("aio", who) for who in (OURS, KEEPALIVE, SPREAD["aio"])),
]
"""Each in one world, which is as good as both, and ours in both."""


@pytest.fixture(scope="module")
def rows_of(measured):
    """What a step's process gave; all run once, a few at a time."""
    jobs = [(step, world, "tiny") for step, _, _, world in RUN]
    jobs += [("heartbeats", world, "tiny", who) for world, who in BEATING]
    rows = measured("benchmarks.connections.child", jobs)
    return lambda *job: [Row(**row) for row in rows[job]]


@pytest.mark.parametrize(("step", "measure", "subjects", "world"), RUN)
def test_every_subject_of_a_step_is_measured(rows_of, step, measure, subjects, world):
    rows = rows_of(step, world, "tiny")
    assert {row.subject for row in rows} == subjects
    assert {(row.world, row.measure) for row in rows} == {(world, measure)}
    for row in rows:
        assert all(math.isfinite(value) and value >= 0 for value in row.values.values())
    if measure == ROUND:
        half = next(row.values for row in rows if row.subject == CLOSING)
        assert half["count"] == half["closed"] == TINY.connections // 2
    if measure == FROZEN:
        assert "answered_s" in next(row.values for row in rows if row.subject == OURS)


@pytest.mark.parametrize(("world", "subject"), BEATING)
def test_idle_channels_are_watched_and_what_that_costs_is_told(rows_of, world, subject):
    (row,) = rows_of("heartbeats", world, "tiny", subject)
    assert (row.side, row.world, row.measure, row.subject) == ("client", world, HEARTBEATS, subject)
    assert row.values["cpu_percent"] > 0
    assert row.values["threads"] >= 1
    tenths = [value for key, value in row.values.items() if key.startswith("tenth_")]
    assert sum(tenths) == pytest.approx(1 if row.values["came"] else 0)
    if subject == UNWATCHED:
        assert row.values["came"] == row.values["sent"] == 0
    if subject == OURS:
        assert row.values["came"] > 0


def test_each_process_of_a_step_is_a_job():
    asked = {step: runner.jobs(step, "tiny") for step in runner.STEPS}
    assert {job.who for job in asked["heartbeats"] if job.world == "aio"} == {
        (who,) for who in beating("aio")
    }
    assert [(job.world, job.who) for job in asked["calls"]] == [("sync", ()), ("aio", ())]
    assert set(asked) == {"heartbeats", *(step[0] for step in STEPS)}
    assert {step for steps in runner.AT_ONCE for step in steps} < set(runner.STEPS)


def test_a_step_that_fails_is_told_of_and_the_others_go_on():
    job = runner.Job("no such step", "sync", "tiny")
    (told,) = runner.rows_of(job)
    assert isinstance(told, Skipped)
    assert told.what == "no such step sync"


def beats(cpu_percent: float, rest: float, interval_s: float, channels: int = 1000) -> Results:
    """A run in which only heartbeats of the sync client were measured, and no rival's."""
    common = {
        "threads": 9.0,
        "most_threads": 12.0,
        "sent": 857.0,
        "expected": 858.0,
        "interval_s": interval_s,
        "channels": float(channels),
    }
    tenths = {f"tenth_{at}": 0.1 for at in range(10)}
    ours = common | tenths | {"cpu_percent": cpu_percent, "came": 856.0}
    none = common | {"cpu_percent": rest, "came": 0.0, "sent": 0.0}
    return Results(
        tuple(
            Row("client", "sync", HEARTBEATS, who, values)
            for who, values in ((UNWATCHED, none), (OURS, ours))
        )
    )


def test_what_heartbeats_cost_is_scaled_to_a_minute_but_what_the_channels_cost_is_not():
    assert percent(beats(10.5, 0.5, 6.0), "sync", OURS) == pytest.approx(0.5 + 10 / 10)
    assert percent(beats(1.5, 0.5, 60.0), "sync", OURS) == 1.5
    assert percent(beats(1.5, 0.5, 60.0, channels=500), "sync", OURS) == 0.5 + 2 * 1.0
    assert percent(beats(1.5, 0.5, 60.0), "aio", OURS) is None


def test_a_heartbeat_s_own_cost_is_what_is_more_than_without_and_is_put_beside_a_bare_call_s():
    results = beats(1.5, 0.5, 60.0)
    assert each_us(results, "sync", OURS) == pytest.approx(0.01 * 60 / 857 * 1e6)
    assert each_us(results, "sync", UNWATCHED) is None
    bare = next(row for row in results.rows if row.subject == OURS).values | {"cpu_percent": 2.5}
    rival = Row("client", "sync", HEARTBEATS, SPREAD["sync"], bare)
    both = Results((*results.rows, rival))
    page = report.page(both, TINY, facts={}, skipped=[], command="me")
    lines = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    assert ["", OURS, "1.50", "1.50", "700", "0.50"] in [line[:6] for line in lines]


def test_a_heartbeat_is_expected_of_each_channel_in_each_interval_but_ours_are_late_by_a_share():
    used_now = [time.monotonic()] * FULL.channels
    assert expected_of(UNWATCHED, FULL, used_now) == 0
    assert expected_of(KEEPALIVE, FULL, used_now) == 1000
    late_by_all = 1000 / (1 + 1 / 3)
    assert late_by_all < expected_of(OURS, FULL, used_now) < 1000


def test_a_target_says_met_or_missed_or_not_measured():
    sync, aio = TARGETS
    assert sync.verdict(beats(1.5, 0.5, 60.0))[1:] == ("1.50 %", "< 2 % of a core", "met")
    assert sync.verdict(beats(2.0, 0.5, 60.0))[-1] == "**missed**"
    assert aio.verdict(beats(1.5, 0.5, 60.0))[-1] == "not measured"


def test_the_page_has_the_target_the_figures_and_what_was_left_out():
    skipped = [Skipped(PSUTIL, "it is not installed")]
    page = report.page(
        beats(10.5, 0.5, 6.0), TINY, facts={"Python": "any"}, skipped=skipped, command="me"
    )
    lines = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    counts = ["9", "12", "857", "858", "856"]
    assert ["", OURS, "10.50", "1.50", "700", "–", *counts, "10 %", ""] in lines
    assert ["", OURS, *["10 %"] * 10, ""] in lines
    assert f"Not measured: {PSUTIL} (it is not installed)." in page
    assert "## Heartbeats of 4 idle channels" in page
    assert "## Connections that come and go" not in page


def test_who_never_found_out_is_told_with_how_long_was_waited():
    rows = (
        Row("client", "aio", FROZEN, OURS, {"waited_s": 8.0, "found_s": 2.8, "answered_s": 2.81}),
        Row("client", "aio", FROZEN, FINDERS[-1], {"waited_s": 8.0}),
    )
    page = report.page(Results(rows), TINY, facts={}, skipped=[], command="me")
    lines = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    assert ["", OURS, "2.80", "2.81", ""] in lines
    assert ["", FINDERS[-1], "> 8", "> 8", ""] in lines


def test_only_a_full_run_has_heartbeats_of_the_real_interval_and_ours_are_in_every_step():
    assert [scale for scale, each in SCALES.items() if each.interval_s == 60.0] == ["full"]
    for _, _, subjects in STEPS[:5]:
        assert any(name.startswith("rpcwheel") for name in subjects)
    assert DETECTOR in CHURNED
