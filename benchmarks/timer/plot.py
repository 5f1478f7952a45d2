"""The plot: what a pair costs, the longest call, memory and garbage collection, as bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.timer.scale import Form, Results, Scale
from benchmarks.timer.subjects import ASYNCIO, NETTY, OWN, QUEUES, SCHED, THREADING, UVLOOP
from benchmarks.timer.tables import figure
from benchmarks.timer.verdict import longest_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NATIVE, PURE, RIVAL = "#1b7f5c", "#7cc4a8", "#9a6a4f"
LINES: tuple[tuple[str, Form], ...] = (
    *((name, "native") for name in QUEUES),
    ("SparseWheel", "pure"),
    (NETTY, "jvm"),
    (UVLOOP, "native"),
    (ASYNCIO, "native"),
    (SCHED, "native"),
    (THREADING, "native"),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the four: a figure for each subject."""

    title: str
    get: Callable[[str, Form], float | None]
    log: bool


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(results: Results, scale: Scale, path: Path) -> None:
    """Write the plot."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    mpl.rcParams |= {"svg.hashsalt": "rpcwheel", "font.size": 10}
    drawing = Figure(figsize=(12, 8.4), layout="constrained")
    axes = drawing.subplots(2, 2)
    for axis, panel in zip(axes.flat, panels(results, scale), strict=True):
        _bars(axis, panel)
    colors = {"rpcwheel, compiled": NATIVE, "rpcwheel, pure Python": PURE, "others": RIVAL}
    patches = [Patch(color=color, label=label) for label, color in colors.items()]
    drawing.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    drawing.savefig(path, metadata={"Date": None})


def panels(results: Results, scale: Scale) -> Sequence[Panel]:
    """What is drawn."""

    def value(measure: str, key: str) -> Callable[[str, Form], float | None]:
        return lambda name, form: results.value(measure, name, key, form)

    def longest(name: str, form: Form) -> float | None:
        found = longest_ms(results, name, form)
        return None if found is None else found * 1e3

    many = f"{scale.many:,}"
    return (
        Panel("Start and cancel, ns of CPU time (log)", value("pair", "cpu_ns"), log=True),
        Panel(f"Longest call while {many} are cancelled, µs (log)", longest, log=True),
        Panel(f"Memory a timeout with {many} pending, bytes", value("memory", "bytes"), log=False),
        Panel(f"gc.collect() with {many} pending, ms", value("gc", "ms"), log=False),
    )


def _bars(axis: Axes, panel: Panel) -> None:
    found = [(name, form, panel.get(name, form)) for name, form in LINES]
    shown = [(name, form, value) for name, form, value in found if value is not None]
    if not panel.log:  # a thread for each timeout is beyond any linear scale
        shown = [each for each in shown if each[0] != THREADING]
    names = [f"{name} (pure)" if form == "pure" else name for name, form, _ in shown]
    values = [value for _, _, value in shown]
    bars: Any = axis.barh(names, values, color=[_color(name, form) for name, form, _ in shown])
    axis.bar_label(bars, labels=[figure(value) for value in values], padding=4)
    axis.set_title(panel.title, loc="left", fontsize=11)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    if panel.log:
        axis.set_xscale("log")
        axis.set_xlim(left=10, right=max(values, default=10) * 4)
    axis.grid(axis="x", color="#dddddd")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _color(name: str, form: Form) -> str:
    if name not in OWN:
        return RIVAL
    return NATIVE if form == "native" else PURE
