"""Netty's HashedWheelTimer, if a JDK is installed: `benchmarks/netty/NettyTimer.java`.

Its start and cancel only fill queues, and its worker does the rest at its next ticks, at most
100,000 starts a tick. So there are two figures: what the caller's thread pays, and that with the
worker's part added. What the JVM's collector and compiler take is in neither, to Netty's favour.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.timer.scale import Row, Scale
from benchmarks.timer.subjects import NETTY

VERSION = "4.2.10.Final"
FOLDER = Path(__file__).parent.parent / "netty"
CALLS = 100_000  # a burst: what the worker links at one tick
TIMEOUT_S = 300.0


class Unavailable(Exception):
    """Netty can't be measured here; says why."""


def measure(scale: Scale) -> list[Row]:
    """Rows `pair`, `start` and `cancel`, with few and with many pending.

    Raises:
        Unavailable: No JDK, no Maven, or the jar could not be had.
    """
    missing = [tool for tool in ("java", "javac", "mvn") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} not found")
    path = f"{_jar()}:{_compiled()}"
    numbers = (scale.netty_rounds, CALLS, *scale.netty_pending)
    return list(_rows(_run("java", "-Xmx2g", "-cp", path, "NettyTimer", *map(str, numbers))))


def java_version() -> str:
    """What `java -version` says of itself, in a line."""
    if shutil.which("java") is None:
        return "none"
    run = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
    return (run.stderr or run.stdout).splitlines()[0]


def _jar() -> Path:
    jar = FOLDER / "jars" / f"netty-common-{VERSION}.jar"
    if not jar.exists():
        artifact = f"-Dartifact=io.netty:netty-common:{VERSION}"
        _run("mvn", "-q", "-B", "dependency:copy", artifact, f"-DoutputDirectory={jar.parent}")
    return jar


def _compiled() -> Path:
    classes = FOLDER / "classes"
    _run("javac", "-cp", str(_jar()), "-d", str(classes), str(FOLDER / "NettyTimer.java"))
    return classes


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S, cwd=FOLDER
        )
    except subprocess.CalledProcessError as error:
        output = (error.stderr or error.stdout).strip().splitlines() or ["no message"]
        raise Unavailable(f"{command[0]} failed: {output[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took longer than {TIMEOUT_S:.0f} s") from error
    return done.stdout


def _rows(output: str) -> Iterator[Row]:
    taken: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    for line in output.splitlines():
        pending, operation, *figures = line.split()
        taken.setdefault((int(pending), operation), []).append(tuple(map(float, figures)))
    for (size, operation), rounds in taken.items():
        wall, caller, worker = (median(each) for each in zip(*rounds, strict=True))
        values = {"wall_ns": wall, "caller_ns": caller, "cpu_ns": caller + worker}
        yield Row(operation, NETTY, "jvm", size, values)
