"""The cost of interceptors on the server's side, by the CPU time of the server's process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import grpc

from benchmarks.calls.far import FarSide
from benchmarks.calls.scale import Row, Scale, World
from benchmarks.calls.subjects import callers, measures, subjects
from benchmarks.calls.sync_client import LOOPS
from benchmarks.calls.turns import take_turns
from benchmarks.timer.clock import Cost


def measure(world: World, scale: Scale) -> list[Row]:
    """A row for each kind of call and each subject; all are called through a bare channel."""
    rows = []
    names = subjects("server", world)
    with FarSide(world, *names) as far, ExitStack() as stack:
        channels = {
            name: stack.enter_context(grpc.insecure_channel(far.targets[name])) for name in names
        }
        for what in measures("server"):
            bursts = {
                name: partial(
                    burst, far, LOOPS[what](channels[name], scale, timeout), scale.units(what)
                )
                for name, timeout in callers("server", world, what)
            }
            taken = take_turns(bursts, rounds=scale.turns(what), warm_up=scale.warm_up)
            rows += taken.rows("server", world, what)
    return rows


def burst(far: FarSide, work: Callable[[], None], units: int) -> Cost:
    """What the work took on the far side, for each of its units."""
    used_ns, began_ns = far.cpu_ns(), time.perf_counter_ns()
    work()
    wall_ns = time.perf_counter_ns() - began_ns
    return Cost((far.cpu_ns() - used_ns) / units, wall_ns / units)
