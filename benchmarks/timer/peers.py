"""The processes that are measured, and the protocol that they speak.

A process measures one timer. It reads requests from stdin, one on a line:

    MEASUREMENT PENDING COUNT

and prints lines to stdout:

    begin             a phase begins; the process waits for a line before it continues
    end NAME COUNT    the phase ends, after so many calls; the process waits for a line
    value NAME VALUE  a figure that the process measured itself
    ok                the request is done; then the process stops the timer

This side measures the phases: it reads the process's clock of CPU time while the process waits. The
measurements, each on a new timer:

- `calls`: start PENDING timeouts with random delays of 30 to 90 s. Phases `pair` (COUNT times:
  start a timeout of 60 s and cancel it), `varied` (the same with random delays of 30 to 90 s),
  `start` (COUNT such timeouts) and `cancel` (the same timeouts, in the same order).
- `backlog`: start COUNT timeouts with random delays of 1 ms to 1 s while the timer is kept from
  running tasks. Phase `backlog`, when all are due: until the last task has run.
- `ontime`: start COUNT timeouts with random delays from 1 s to 1 s + COUNT / 100 ms, so that a
  hundred are due in each millisecond. Phase `ontime`: until the last task has run.
- `pending`: phase `empty`: COUNT milliseconds without timeouts. Then PENDING timeouts are started:
  the phase `memory`, or the value `bytes` of each where a garbage collector knows it better than
  the system. Phase `idle`: again COUNT milliseconds.
- `lateness`: COUNT timeouts of 1 to 100 ms; values `p50_us`, `p99_us` and `least_us`.

All random delays are drawn before the phase and are multiples of 1 ms. Tasks do nothing. In `calls`
and `backlog`, garbage is collected before the first phase; in `calls`, about COUNT / 4 pairs follow
that are not measured. A phase ends when the timer's own thread has also done its part. Python has
more measurements: `child.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from benchmarks._process import ROOT
from benchmarks.calls.subjects import Skipped
from benchmarks.timer import child
from rpcwheel.timer.queue import load_form

RIVALS = ROOT / "benchmarks" / "rivals"
LIMIT_S = 300.0  # for one request, and for one build
PATH = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/local/go/bin", f"{Path.home()}/.cargo/bin"]
)

SETTLE_S = 0.001  # until a process that printed a line waits for the answer
WARM_UP = 12  # requests until a Java virtual machine has compiled what is measured

HIERARCHICAL, SPARSE, HASHED, _ = QUEUES = tuple(child.QUEUES)
ASYNC, ASYNC_UVLOOP = "AsyncWheelTimer", "AsyncWheelTimer on uvloop"
ASYNCIO, UVLOOP, THREADING = "asyncio", "uvloop", "threading.Timer"
NETTY = ("Netty, 512 slots", "Netty, 65,536 slots")
KAFKA, JDK, GO, TOKIO = "Kafka SystemTimer", "JDK executor", "Go AfterFunc", "tokio DelayQueue"


@dataclass(frozen=True, slots=True)
class Subject:
    """A timer that can be measured, and the command that starts its process."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    warm_up: int = 0


def subjects() -> Iterator[Subject | Skipped]:
    """All timers that can be measured here; the reasons for the others."""
    has_uvloop = find_spec("uvloop") is not None
    if not has_uvloop:
        yield Skipped("uvloop", "it is not installed")
    forms: list[Literal["native", "pure"]] = ["native", "pure"]
    try:
        load_form("native")
    except ImportError:
        forms = ["pure"]
        yield Skipped("the compiled form", "it is not built here")
    command = (sys.executable, "-m", "benchmarks.timer.child")
    for form in forms:
        for name in (*QUEUES, ASYNC, ASYNC_UVLOOP):
            if has_uvloop or name != ASYNC_UVLOOP:
                label = name if form == "native" else f"{name}, pure"
                pure = "1" if form == "pure" else "0"
                yield Subject(label, (*command, name), {"RPCWHEEL_PURE": pure})
    for name in (ASYNCIO, UVLOOP, THREADING):
        if has_uvloop or name != UVLOOP:
            yield Subject(name, (*command, name))


def rivals() -> Iterator[Subject | Skipped]:
    """Timers of other languages, if their tools are installed. Builds their programs."""
    for names, tools, build in (
        ((*NETTY, KAFKA, JDK), ("java", "javac", "mvn"), _java),
        ((GO,), ("go",), _go),
        ((TOKIO,), ("cargo",), _rust),
    ):
        missing = [tool for tool in tools if shutil.which(tool, path=PATH) is None]
        why = f"{', '.join(missing)} not found" if missing else ""
        if not missing:
            try:
                yield from build()
            except PeerFailed as error:
                why = str(error)
        yield from (Skipped(name, why) for name in names if why)


def versions() -> dict[str, str]:
    """The versions of the tools that are installed, and of what they measure."""
    jars = [jar.stem for jar in (RIVALS / "jars").glob("*.jar") if "common" in jar.name]
    crates = tomllib.loads((RIVALS / "Cargo.toml").read_text())["dependencies"]
    found = {}
    for name, command, others in (
        ("Java", ("java", "--version"), sorted(jars)),
        ("Go", ("go", "version"), ()),
        ("Rust", ("rustc", "--version"), [f"{key} {crates[key]['version']}" for key in crates]),
    ):
        if tool := shutil.which(command[0], path=PATH):
            done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)
            found[name] = ", ".join([done.stdout.partition("\n")[0], *others]).replace("=", "")
    return found


def _java() -> Iterator[Subject]:
    jars, new = RIVALS / "jars", RIVALS / "jars.new"
    if not jars.exists() or jars.stat().st_mtime < (RIVALS / "pom.xml").stat().st_mtime:
        _run("mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={new}")
        shutil.rmtree(jars, ignore_errors=True)
        new.rename(jars)
    _run("javac", "-cp", "jars/*", "-d", "classes", "Timers.java")
    names = {
        NETTY[0]: "netty-512", NETTY[1]: "netty-65536", KAFKA: "kafka", JDK: "jdk"
    }  # fmt: skip
    path = os.pathsep.join([f"{RIVALS}/classes", f"{RIVALS}/jars/*"])
    for name, argument in names.items():
        command = ("java", "-Xms2g", "-Xmx4g", "-cp", path, "Timers", argument)
        yield Subject(name, command, warm_up=WARM_UP)


def _go() -> Iterator[Subject]:
    _run("go", "build", "-o", "bin/timers", ".")
    yield Subject(GO, (f"{RIVALS}/bin/timers",))


def _rust() -> Iterator[Subject]:
    _run("cargo", "build", "-q", "--release", "--locked")
    yield Subject(TOKIO, (f"{RIVALS}/target/release/timers",))


def _run(*command: str) -> None:
    try:
        subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=LIMIT_S, cwd=RIVALS,
            env=os.environ | {"PATH": PATH},
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        output = (error.stderr or error.stdout).strip().splitlines() or ["no message"]
        raise PeerFailed(f"{command[0]} failed: {output[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"{command[0]} took longer than {LIMIT_S:.0f} s") from error


class PeerFailed(Exception):
    """A process could not be built, or ended during a request."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used since its start, or in a phase."""

    cpu_ns: int
    wall_ns: int
    bytes: int
    sleeps: int
    """How often a thread went to sleep. Each wake-up is followed by one."""


@dataclass(slots=True)
class Answer:
    """The result of a request."""

    phases: dict[str, Usage] = field(default_factory=dict)
    cpu_ns: dict[str, float] = field(default_factory=dict)
    """CPU time of a call of each phase."""
    values: dict[str, float] = field(default_factory=dict)


class Peer:
    """The process of a subject. Ends when closed."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._process = subprocess.Popen(
            subject.command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            bufsize=1, env=os.environ | {"PATH": PATH} | dict(subject.env),
        )  # fmt: skip
        self._clock = (~self._process.pid << 3) | 2  # CPUCLOCK_SCHED of the process
        self._proc = Path("/proc", str(self._process.pid))
        self._first = ""

    def ask(self, measurement: str, pending: int, count: int) -> Answer:
        """Make a request, and measure its phases.

        Raises:
            PeerFailed: The process ended, or did not answer within `LIMIT_S`.
        """
        self.send(measurement, pending, count)
        return self.receive()

    def send(self, measurement: str, pending: int, count: int) -> None:
        """Make a request. It proceeds until its first phase."""
        self._write(f"{measurement} {pending} {count}")

    def prepare(self) -> None:
        """Wait until the first phase of the request can begin. Raises as `ask`."""
        self._first = self._read()

    def receive(self) -> Answer:
        """Measure the phases of the request. Raises as `ask`."""
        answer = Answer()
        watchdog = threading.Timer(LIMIT_S, self._process.kill)
        watchdog.start()
        try:
            before = None
            while (line := self._read().split()) != ["ok"]:
                match line:
                    case ["begin"]:
                        before = self._usage(at_end=False)
                        self._write("")
                    case ["end", name, count] if before is not None:
                        used = answer.phases[name] = _difference(before, self._usage(at_end=True))
                        answer.cpu_ns[name] = used.cpu_ns / int(count)
                        self._write("")
                    case ["value", name, value]:
                        answer.values[name] = float(value)
                    case _:
                        raise PeerFailed(f"unexpected line: {' '.join(line)}")
        finally:
            watchdog.cancel()
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _usage(self, *, at_end: bool) -> Usage:
        if not at_end:
            time.sleep(SETTLE_S)
        cpu_ns, wall_ns = time.clock_gettime_ns(self._clock), time.perf_counter_ns()
        pages = int((self._proc / "statm").read_text().split()[1])
        if at_end:
            time.sleep(SETTLE_S)
        sleeps = sum(_sleeps(task / "status") for task in (self._proc / "task").iterdir())
        return Usage(cpu_ns, wall_ns, pages * os.sysconf("SC_PAGE_SIZE"), sleeps)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line, self._first = self._first or self._process.stdout.readline(), ""
        if not line:
            raise PeerFailed(f"its process ended with code {self._process.wait()}")
        return line

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
        except BrokenPipeError as error:
            raise PeerFailed(f"its process ended with code {self._process.wait()}") from error


def _difference(before: Usage, after: Usage) -> Usage:
    return Usage(
        after.cpu_ns - before.cpu_ns,
        after.wall_ns - before.wall_ns,
        after.bytes - before.bytes,
        after.sleeps - before.sleeps,
    )


def _sleeps(status: Path) -> int:
    try:
        lines = status.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_"))
