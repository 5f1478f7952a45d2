"""The queues, in compiled ("native") or pure form.

`RPCWHEEL_PURE=1` selects the pure form; without a C compiler at installation it is the only one.
Both forms behave alike. `load_form` loads either, for tests and benchmarks.

Both forms rely on the GIL (`_base.py`, "Threads"). In a free-threaded build of CPython, loading the
compiled form switches the GIL on for the rest of the process, with CPython's `RuntimeWarning`: its
modules do not declare `Py_MOD_GIL_NOT_USED`. If the GIL is off nevertheless, because the form is
pure or the user forces it off (`PYTHON_GIL=0`), importing this module raises ImportError.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from rpcwheel.timer._heap import HeapMixin

__all__ = [
    "FORM",
    "DeadlineHeap",
    "Form",
    "HashedWheel",
    "HierarchicalWheel",
    "SparseWheel",
    "Timeout",
    "TimerBase",
    "TimerQueue",
    "TimerState",
    "default_queue",
    "load_form",
]

if TYPE_CHECKING:
    from rpcwheel.timer._base import Timeout, TimerQueue, TimerState
    from rpcwheel.timer._front import TimerBase
    from rpcwheel.timer._sparse import SparseWheel
    from rpcwheel.timer._wheel import HashedWheel, HierarchicalWheel

    class DeadlineHeap(HeapMixin):
        """`HeapMixin` on the selected `TimerQueue`."""


@dataclass(frozen=True, slots=True)
class Form:
    """The classes of one form."""

    name: Literal["native", "pure"]
    Timeout: type[Timeout]
    TimerQueue: type[TimerQueue]
    HashedWheel: type[HashedWheel]
    HierarchicalWheel: type[HierarchicalWheel]
    SparseWheel: type[SparseWheel]
    DeadlineHeap: type[DeadlineHeap]
    TimerState: type[TimerState]
    TimerBase: type[TimerBase]


def load_form(name: Literal["native", "pure"]) -> Form:
    """Load one form.

    Raises:
        ImportError: The native form was not built (no C compiler at installation).
    """
    suffix = "_c" if name == "native" else ""
    base, wheel, sparse, front = (
        import_module(f"rpcwheel.timer._{part}{suffix}")
        for part in ("base", "wheel", "sparse", "front")
    )
    heap = type(
        "DeadlineHeap",
        (HeapMixin, base.TimerQueue),
        {"__module__": __name__, "__doc__": HeapMixin.__doc__},
    )
    return Form(
        name=name,
        Timeout=base.Timeout,
        TimerQueue=base.TimerQueue,
        HashedWheel=wheel.HashedWheel,
        HierarchicalWheel=wheel.HierarchicalWheel,
        SparseWheel=sparse.SparseWheel,
        DeadlineHeap=heap,
        TimerState=base.TimerState,
        TimerBase=front.TimerBase,
    )


def _selected_form() -> Form:
    form = None
    if os.environ.get("RPCWHEEL_PURE", "0") in {"", "0"}:
        with suppress(ImportError):
            form = load_form("native")  # switches the GIL on, unless PYTHON_GIL=0 or -X gil=0
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise ImportError(
            "rpcwheel's timer relies on the GIL, and in this process the GIL is off: start Python "
            "with PYTHON_GIL=1 in the environment or with -X gil=1 (which takes precedence)"
        )
    return form or load_form("pure")


_form = _selected_form()
FORM = _form.name

if not TYPE_CHECKING:
    Timeout = _form.Timeout
    TimerQueue = _form.TimerQueue
    HashedWheel = _form.HashedWheel
    HierarchicalWheel = _form.HierarchicalWheel
    SparseWheel = _form.SparseWheel
    DeadlineHeap = _form.DeadlineHeap
    TimerState = _form.TimerState
    TimerBase = _form.TimerBase


def default_queue() -> TimerQueue:
    """Return the fastest queue: compiled the hierarchical wheel, pure the sparse wheel."""
    return HierarchicalWheel() if FORM == "native" else SparseWheel()
