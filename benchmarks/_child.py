"""Runs a measurement in a separate process, which prints its rows as a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks._process import ROOT
from benchmarks.calls.scale import Row
from benchmarks.calls.subjects import Skipped


def output_of(
    module: str, *arguments: str, timeout_s: float, env: Mapping[str, str] | None = None
) -> list[dict[str, Any]] | str:
    """The output of `python -m MODULE ARGUMENTS`; a string if it failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | (env or {}),
            stdout=subprocess.PIPE,
            check=True,
            timeout=timeout_s,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return str(error)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def print_rows(measured: Sequence[object]) -> None:
    """Print dataclasses as a line of JSON."""
    print(json.dumps(measured, default=asdict), flush=True)


def rows(
    what: str,
    module: str,
    arguments: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> list[Row | Skipped]:
    """The rows of a module; or one `Skipped` with the name `what` and the reason."""
    answer = output_of(module, *arguments, timeout_s=timeout_s, env=env)
    if isinstance(answer, str):
        return [Skipped(what, answer)]
    return [Row(**row) for row in answer]
