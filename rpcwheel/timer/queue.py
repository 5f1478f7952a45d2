"""The queues, in the form that this installation runs: compiled ("native"), or pure Python.

`RPCWHEEL_PURE=1` forces the pure form; without a compiler at install time there is no other. Both
behave alike, and `load_form` gives either of them, for tests and benchmarks that compare.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from rpcwheel.timer._heap import HeapRules

__all__ = [
    "FORM",
    "DeadlineHeap",
    "Form",
    "Front",
    "HashedWheel",
    "HierarchicalWheel",
    "Hub",
    "SparseWheel",
    "Timeout",
    "TimerQueue",
    "default_queue",
    "load_form",
]

if TYPE_CHECKING:
    from rpcwheel.timer._base import Hub, Timeout, TimerQueue
    from rpcwheel.timer._front import Front
    from rpcwheel.timer._sparse import SparseWheel
    from rpcwheel.timer._wheel import HashedWheel, HierarchicalWheel

    class DeadlineHeap(HeapRules):
        """The rules, on the chosen form's `TimerQueue`."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of everything that exists in two."""

    name: Literal["native", "pure"]
    Timeout: type[Timeout]
    TimerQueue: type[TimerQueue]
    HashedWheel: type[HashedWheel]
    HierarchicalWheel: type[HierarchicalWheel]
    SparseWheel: type[SparseWheel]
    DeadlineHeap: type[DeadlineHeap]
    Hub: type[Hub]
    Front: type[Front]


def load_form(name: Literal["native", "pure"]) -> Form:
    """Load one form.

    Raises:
        ImportError: The native form was not built (no C compiler when rpcwheel was installed).
    """
    suffix = "_c" if name == "native" else ""
    base, wheel, sparse, front = (
        import_module(f"rpcwheel.timer._{part}{suffix}")
        for part in ("base", "wheel", "sparse", "front")
    )
    heap = type(
        "DeadlineHeap",
        (HeapRules, base.TimerQueue),
        {"__module__": __name__, "__doc__": HeapRules.__doc__},
    )
    return Form(
        name=name,
        Timeout=base.Timeout,
        TimerQueue=base.TimerQueue,
        HashedWheel=wheel.HashedWheel,
        HierarchicalWheel=wheel.HierarchicalWheel,
        SparseWheel=sparse.SparseWheel,
        DeadlineHeap=heap,
        Hub=base.Hub,
        Front=front.Front,
    )


def _choose() -> Form:
    """The native form if it was built and is not ruled out. Loading it switches the GIL on."""
    form = _first_form()
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise ImportError(
            "rpcwheel's timer relies on the GIL: run this free-threaded Python with PYTHON_GIL=1"
        )
    return form


def _first_form() -> Form:
    if os.environ.get("RPCWHEEL_PURE", "0") not in {"", "0"}:
        return load_form("pure")
    try:
        return load_form("native")
    except ImportError:
        return load_form("pure")


_form = _choose()
FORM = _form.name

if not TYPE_CHECKING:
    Timeout = _form.Timeout
    TimerQueue = _form.TimerQueue
    HashedWheel = _form.HashedWheel
    HierarchicalWheel = _form.HierarchicalWheel
    SparseWheel = _form.SparseWheel
    DeadlineHeap = _form.DeadlineHeap
    Hub = _form.Hub
    Front = _form.Front


def default_queue() -> TimerQueue:
    """The fastest queue of this form: compiled the hierarchical wheel, pure the sparse one."""
    return HierarchicalWheel() if FORM == "native" else SparseWheel()
