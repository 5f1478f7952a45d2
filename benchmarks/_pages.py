"""What the pages of docs/benchmarks have besides their tables: pictures, wins and losses.

All of it is made from the tables of the page, so that it cannot differ from them. A benchmark
writes its tables and calls `complete`. `python -m benchmarks` does the same for the pages that are
there. A loss becomes a win by itself if a later run says so.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from pathlib import Path

from benchmarks import _page
from benchmarks._plot import Panel, bars
from benchmarks._tables import Table, label, tables, value

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"

BEGIN = "<!-- The following is made from the tables below, by benchmarks/_pages.py. -->"
END = "<!-- The end of what is made from the tables. -->"

EQUAL = 1.05
"""Figures that are closer are neither a win nor a loss."""

LINE = 130
"""The longest line of a paragraph."""

OWN = re.compile(
    r"rpcwheel|Wheel|DeadlineHeap|[Jj]ournal|in memory|two of them|of a channel|kit\.|`idle`|"
    r"queued call|^method|^instance|^timeout|, with hedging|over the window|"
    r"^(sqlite|postgresql|redis)$"
)
"""The rows of rpcwheel in pictures."""


@dataclass(frozen=True, slots=True)
class Source:
    """A table: the heading above it, its first header, and how many columns name its rows."""

    section: str
    first: str = ""
    names: int = 1


@dataclass(frozen=True, slots=True)
class Picture:
    """Bars of some columns of a table."""

    file: str
    title: str
    source: Source
    columns: tuple[str, ...]
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of rpcwheel beside rows of others."""

    what: str
    source: Source
    column: str
    ours: str
    others: tuple[str, ...]
    more_is_better: bool = False
    noise: str = ""
    """A column with quartiles in brackets: if they overlap, the figures count as equal."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a comparison has found."""

    what: str
    ours: str
    other: str
    theirs: str
    times: float
    """How many times worse that of rpcwheel is."""
    is_equal: bool

    @property
    def rival(self) -> str:
        """The rival, its figure, and how many times better or worse it is."""
        times = max(self.times, 1 / self.times) if self.times else inf
        shown = f"{times:,.0f}" if times >= 100 else f"{times:.3g}"
        return f"{self.other} {self.theirs}" + ("" if times == inf else f" ({shown}×)")


@dataclass(frozen=True, slots=True)
class About:
    """What is added to a page."""

    command: str
    minutes: str
    rivals: str
    losses: str
    wins: str
    engines: str = ""
    """Whose versions a page should have."""
    pictures: tuple[Picture, ...] = ()
    comparisons: tuple[Comparison, ...] = field(default=())


def complete(name: str, page: str) -> tuple[str, dict[str, str]]:
    """Add what is made from the tables of a page; what an earlier call has added is replaced.

    Returns:
        The page, and its pictures by the names of their files.
    """
    about = PAGES[name]
    page = _without_additions(page, about)
    found = list(tables(page))
    lines = page.split("\n")
    pictures, links = {}, {}
    for picture in about.pictures:
        table = _find(found, picture.source, picture.columns)
        if table is not None:
            pictures[picture.file] = draw(picture, table)
            links[table.line] = f"![{picture.title}]({picture.file})"
    for number in sorted(links, reverse=True):
        lines[number:number] = [links[number], ""]
    headings = (number for number, line in enumerate(lines) if line.startswith("##"))
    first = next(headings, len(lines))
    lines[first:first] = [
        BEGIN,
        "",
        *_sections(about, found, has_engines="* Engines: " in page),
        "",
        END,
        "",
    ]
    return "\n".join(lines), pictures


def write(name: str, page: str, directory: Path) -> None:
    """Write a page that is complete, with its pictures."""
    page, pictures = complete(name, page)
    (directory / f"{name}.md").write_text(page)
    for file, picture in pictures.items():
        (directory / file).write_text(picture)


def draw(picture: Picture, table: Table) -> str:
    """The picture, as SVG."""
    names = [each.replace("`", "") for each in table.names(picture.source.names)]
    panels = []
    for header in picture.columns:
        cells = table.column(header)
        panels.append(
            Panel(
                header,
                [value(cell) for cell in cells],
                [label(cell) for cell in cells],
                picture.logarithmic,
            )
        )
    own = [bool(OWN.search(name)) for name in table.names(picture.source.names)]
    return bars(picture.title, names, own, panels)


def _without_additions(page: str, about: About) -> str:
    page = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}\n\n", "", page, flags=re.DOTALL)
    for picture in about.pictures:
        page = re.sub(rf"^!\[.*?\]\({re.escape(picture.file)}\)\n\n", "", page, flags=re.MULTILINE)
    return page


def _find(found: Sequence[Table], source: Source, columns: Sequence[str]) -> Table | None:
    """The table; None if this run has not measured it."""
    for table in found:
        is_named = (table.section, table.headers[0]) == (source.section, source.first)
        if is_named and set(columns) <= set(table.headers):
            return table
    return None


def _sections(about: About, found: Sequence[Table], *, has_engines: bool) -> Iterator[str]:
    unknown = ""
    if about.engines and not has_engines:
        unknown = f" (This run has not recorded the versions of {about.engines}.)"
    results = list(_compare(about.comparisons, found))
    different = [result for result in results if not result.is_equal]
    yield from ("## How to repeat it", "")
    yield _paragraph(
        f"In a clone, `pip install -e '.[bench]'` and `{about.command}`, on a machine that does "
        f"nothing else. {about.minutes} {about.rivals}{unknown}"
    )
    for title, words, side in (
        ("loses", about.losses, [each for each in different if each.times > 1]),
        ("wins", about.wins, [each for each in different if each.times < 1]),
    ):
        yield from ("", f"## Where rpcwheel {title}", "", _paragraph(words))
        if side:
            lines = [
                (*ours, "; ".join(result.rival for result in results_of_row))
                for ours, results_of_row in groupby(side, lambda each: (each.what, each.ours))
            ]
            yield from ("", _page.table(("", "rpcwheel", "rivals"), lines))
    if equal := len(results) - len(different):
        verb = "comparison shows" if equal == 1 else "comparisons show"
        yield from (
            "",
            f"{equal} more {verb} no difference: less than 5 %, or less than the noise.",
        )


def _paragraph(words: str) -> str:
    return textwrap.fill(words, LINE, break_long_words=False, break_on_hyphens=False)


def _compare(comparisons: Sequence[Comparison], found: Sequence[Table]) -> Iterator[Result]:
    for comparison in comparisons:
        table = _find(found, comparison.source, (comparison.column,))
        if table is None:
            continue
        names = table.names(comparison.source.names)
        cells = dict(zip(names, table.column(comparison.column), strict=True))
        own = value(cells.get(comparison.ours, ""))
        for other in comparison.others:
            theirs = value(cells.get(other, ""))
            if own is None or theirs is None:
                continue
            more, less = (theirs, own) if comparison.more_is_better else (own, theirs)
            times = more / less if less else inf if more else 1.0
            is_equal = 1 / EQUAL < times < EQUAL
            if comparison.noise and not is_equal:
                first, second = (
                    table.quartiles(names.index(name), comparison.noise)
                    for name in (comparison.ours, other)
                )
                is_equal = first[0] <= second[1] and second[0] <= first[1]
            yield Result(
                comparison.what,
                label(cells[comparison.ours]),
                other,
                label(cells[other]),
                times,
                is_equal,
            )


# calls

_WORLDS = {"sync": "`grpc`", "aio": "`grpc.aio`"}
_CALL_KINDS = {
    "unary, a call": "a unary call",
    "response stream, a message": "a message of a response stream",
    "request stream, a message": "a message of a request stream",
    "both stream, a message": "a message, both stream",
}

_CALLS = About(
    command="python -m benchmarks.calls",
    minutes="`--quick` takes about two minutes; a whole run makes ten times as many calls.",
    rivals="The rivals are a bare channel or server of grpcio, one interceptor that does nothing, "
    "grpc-interceptor, and OpenTelemetry's instrumentation; their versions are above.",
    losses="Each call passes Python code that a bare channel does not have, and gets a deadline, "
    "which costs gRPC time too. The interceptor of grpc-interceptor does nothing.",
    wins="OpenTelemetry's instrumentation makes a span for each call, which rpcwheel does not.",
    pictures=(
        *(
            Picture(
                f"calls-{side.lower()}-{world}.svg",
                f"{side}, {name.strip('`')}: a unary call",
                Source(f"{side}, {name}", "unary, a call"),
                ("CPU, µs", "wall, µs"),
            )
            for side in ("Client", "Server")
            for world, name in _WORLDS.items()
        ),
        Picture(
            "calls-hedging.svg",
            "Unary calls to a server that delays 1 in 20 by 1 s",
            Source("Hedging", "unary calls"),
            ("p50, ms", "p99, ms", "longest, ms"),
        ),
    ),
    comparisons=(
        *(
            Comparison(
                f"client, {name}, {kind}, CPU in µs",
                Source(f"Client, {name}", first),
                "CPU, µs",
                "rpcwheel: kit.channel()",
                ("bare", "grpc-interceptor", "OpenTelemetry"),
                noise="× no-op",
            )
            for name in _WORLDS.values()
            for first, kind in _CALL_KINDS.items()
        ),
        *(
            Comparison(
                f"server, {name}, {kind}, CPU in µs",
                Source(f"Server, {name}", first),
                "CPU, µs",
                "rpcwheel: whole Kit",
                ("bare", "grpc-interceptor", "OpenTelemetry"),
                noise="× no-op",
            )
            for name in _WORLDS.values()
            for first, kind in _CALL_KINDS.items()
        ),
    ),
)

# connections

_BEATS = "Heartbeats of 1,000 idle channels, each 60 s"
_EACH = {"sync": "a thread for each", "aio": "a task for each"}

_CONNECTIONS = About(
    command="python -m benchmarks.connections",
    minutes="`--quick` takes three minutes; a whole run measures five times as many calls, and "
    "heartbeats for two and a half minutes.",
    rivals="The rivals are gRPC itself (keepalive, `http2.ping_timeout_ms`, new channels), and "
    "heartbeats by hand: a thread or task for each channel. The version of grpcio is above.",
    losses="A heartbeat of rpcwheel is a call that the server answers; gRPC's keepalive is a ping "
    "of HTTP/2. A replaced connection is a new channel with a connection of its own, and a little "
    "more. The table of connections costs a server time with each call.",
    wins="One timer for all channels takes one thread, and spreads the heartbeats. A channel that "
    "replaces its connection does not wait for gRPC's backoff after an outage.",
    pictures=(
        *(
            Picture(
                f"connections-heartbeats-{world}.svg",
                f"Heartbeats of 1,000 idle channels each 60 s, {name.strip('`')}",
                Source(_BEATS, f"CPU of the client, {name}"),
                ("CPU, % of a core", "threads", "largest tenth"),
            )
            for world, name in _WORLDS.items()
        ),
        *(
            Picture(
                f"connections-outage-{world}.svg",
                f"After an outage of 4 s, {name.strip('`')}: until a call is answered",
                Source("A channel that reconnects", f"after an outage, {name}"),
                ("call answered after, ms", "longest, ms"),
                logarithmic=True,
            )
            for world, name in _WORLDS.items()
        ),
        *(
            Picture(
                f"connections-frozen-{world}.svg",
                f"A server that is frozen, {name.strip('`')}",
                Source("A frozen server", f"the server is frozen, {name}"),
                ("call in flight ended after, s", "next call answered after, s"),
            )
            for world, name in _WORLDS.items()
        ),
    ),
    comparisons=(
        *(
            Comparison(
                f"heartbeats of idle channels, {name}, CPU in % of a core",
                Source(_BEATS, f"CPU of the client, {name}"),
                "CPU, % of a core",
                "rpcwheel: HeartbeatManager",
                ("gRPC's keepalive", f"{_EACH[world]} channel", f"{_EACH[world]}, spread"),
            )
            for world, name in _WORLDS.items()
        ),
        *(
            Comparison(
                f"{what}, {name}, {unit}",
                Source("A channel that reconnects", f"{first}, {name}"),
                column,
                "rpcwheel: reconnect()",
                others,
            )
            for name in _WORLDS.values()
            for what, first, column, unit, others in (
                (
                    "a new connection, first answer",
                    "a new connection",
                    "call answered after, µs",
                    "µs",
                    ("a new channel, own connection", "a new channel"),
                ),
                (
                    "first answer after an outage",
                    "after an outage",
                    "call answered after, ms",
                    "ms",
                    ("a new channel, own connection", "a new channel", "the same channel, waiting"),
                ),
            )
        ),
        *(
            Comparison(
                f"a call in flight to a frozen server, {name}, s",
                Source("A frozen server", f"the server is frozen, {name}"),
                "call in flight ended after, s",
                "rpcwheel: HeartbeatManager",
                (
                    "gRPC's http2.ping_timeout_ms",
                    "gRPC's keepalive_timeout_ms",
                    "nothing at all",
                ),
            )
            for name in _WORLDS.values()
        ),
        *(
            Comparison(
                f"a unary call to a server with the table of connections, {name}, CPU in µs",
                Source("ConnectionTable on a server", f"a unary call, {name}"),
                "CPU, µs",
                "rpcwheel: and IdleConnectionDetector",
                ("no interceptor", "one no-op interceptor"),
                noise="× no-op",
            )
            for name in _WORLDS.values()
        ),
    ),
)

# failback

_APPENDS = {
    name: Source(f"Appends, `durability={name}`", "threads", names=2)
    for name in ("process", "power")
}

_FAILBACK = About(
    command="python -m benchmarks.failback",
    minutes="`--quick` takes about two minutes; a whole run stores 10,000,000 calls, and needs 7 "
    "GB of disk.",
    rivals="The rival is the module `sqlite3` of Python, which executes the same statements.",
    engines="SQLite",
    losses="A journal costs a failed call what the engine costs, and the objects around it. One "
    "thread with all calls at hand is much faster than callers that each wait for their own: "
    "callers in Python share one interpreter.",
    wins="Callers that fail at the same time share a transaction, which matters where each "
    "transaction waits for the disk.",
    pictures=(
        *(
            Picture(
                f"failback-appends-{name}.svg",
                f"Calls stored in a second, durability={name}, by threads",
                source,
                ("calls/s",),
                logarithmic=True,
            )
            for name, source in _APPENDS.items()
        ),
        Picture(
            "failback-backlog.svg",
            "A long queue and a server that executes 80 calls a second (the last one: at once)",
            Source("A long queue and a healthy server"),
            ("calls/s",),
            logarithmic=True,
        ),
    ),
    comparisons=(
        *(
            Comparison(
                f"calls/s stored by {threads} thread{'s' * (threads > 1)}, `durability={name}`",
                source,
                "calls/s",
                f"{threads}, `Journal.append_now`",
                (
                    f"{threads}, bare sqlite3, one transaction for each call",
                    f"{threads}, bare sqlite3, transactions of as many calls as threads",
                ),
                more_is_better=True,
            )
            for name, source in _APPENDS.items()
            for threads in (1, 8, 64)
        ),
    ),
)

# journal

_JOURNAL_TABLES = {
    "Append, one by one": "one",
    "Append, batches of 100": "batch",
    "Take and report, one by one": "take-one",
    "Take and report, batches of 100, 1 worker": "take-batch",
    "Take and report, batches of 100, 4 workers": "take-batch-4",
}

_JOURNAL = About(
    command="python -m benchmarks.journal",
    minutes="`--quick` takes half a minute.",
    rivals="The rivals are the drivers of the engines: `sqlite3` of Python, psycopg and redis-py, "
    "which execute the same statements.",
    engines="SQLite, PostgreSQL and Redis",
    losses="rpcwheel checks and converts each call; the bare driver gets values that were prepared "
    "before, and makes no objects. That shows most where the engine itself is fast: SQLite "
    "without waiting for the disk.",
    wins="Taking and reporting in batches from PostgreSQL: the bare driver executes the same "
    "statements. Why it takes ten times as long has not been examined.",
    pictures=tuple(
        Picture(
            f"journal-{name}.svg",
            section,
            Source(section),
            ("calls/s", "CPU, µs"),
            logarithmic=True,
        )
        for section, name in _JOURNAL_TABLES.items()
    ),
    comparisons=tuple(
        Comparison(
            f"{section[0].lower()}{section[1:]}, calls/s",
            Source(section),
            "calls/s",
            f"{engine}, rpcwheel",
            (f"{engine}, bare driver",),
            more_is_better=True,
            noise="× bare",
        )
        for section in _JOURNAL_TABLES
        for engine in ("sqlite-process", "sqlite-power", "postgresql", "redis")
    ),
)

# registries

_CONVERGE = "1,000 subscribers see 1,000 instances"
_ROLLING = "A client during a rolling restart of 2,000 instances"
_ENGINES = {
    "etcd": "etcd: a bare watch",
    "zookeeper": "zookeeper: kazoo's ChildrenWatch",
    "redis": "redis: a poll of the hash, each 0.5 s",
}

_REGISTRIES = About(
    command="python -m benchmarks.registries",
    minutes="`--quick` takes three minutes.",
    rivals="The rivals are bare channels and gRPC's own list of addresses with `round_robin`, a "
    "bare watch of etcd, kazoo's `ChildrenWatch`, and a poll of Redis.",
    engines="etcd, ZooKeeper and Redis",
    losses="A channel by name chooses in Python, gRPC in C. Following a registry costs more than a "
    "bare watch, which checks nothing, keeps nothing when the registry fails, and makes no "
    "objects of the records.",
    wins="Compared with a poll, changes arrive at once.",
    pictures=(
        *(
            Picture(
                f"registries-call-{world}.svg",
                f"A unary call, {name.strip('`')}",
                Source("A unary call", name),
                ("CPU, µs", "wall, µs"),
            )
            for world, name in _WORLDS.items()
        ),
        Picture(
            "registries-converge.svg",
            _CONVERGE,
            Source(_CONVERGE),
            (
                "all seen by all after, s",
                "one changed, ms (longest)",
                "one withdrawn, ms (longest)",
            ),
        ),
        Picture(
            "registries-restart.svg", _ROLLING, Source(_ROLLING), ("CPU for each instance, ms",)
        ),
        Picture(
            "registries-republish.svg",
            "1,000 instances are published again",
            Source("1,000 instances are published again"),
            ("all after, s", "most in 0.1 s"),
        ),
    ),
    comparisons=(
        *(
            Comparison(
                f"a unary call to {what}, {name}, CPU in µs",
                Source("A unary call", name),
                "CPU, µs",
                ours,
                (other,),
                noise="× bare",
            )
            for name in _WORLDS.values()
            for what, ours, other in (
                ("one server", "rpcwheel: by name, one", "bare channel"),
                ("3 servers", "rpcwheel: by name, few", "grpc: ipv4: list, few"),
                ("100 servers", "rpcwheel: by name, many", "grpc: ipv4: list, many"),
            )
        ),
        *(
            Comparison(what, Source(_CONVERGE), column, f"{engine}: rpcwheel", (other,))
            for engine, other in _ENGINES.items()
            for what, column in (
                ("1,000 subscribers see 1,000 instances, s", "all seen by all after, s"),
                ("they see one change, ms", "one changed, ms (longest)"),
                ("they see one withdrawal, ms", "one withdrawn, ms (longest)"),
            )
        ),
        *(
            Comparison(
                "a client during a rolling restart, CPU for each instance in ms",
                Source(_ROLLING),
                "CPU for each instance, ms",
                f"{engine}: rpcwheel: a channel by name",
                (other,),
            )
            for engine, other in _ENGINES.items()
        ),
    ),
)

# timer

_NETTY = ("Netty, 512 slots", "Netty, 65,536 slots")
_OTHERS = ("Kafka SystemTimer", "JDK executor", "Go AfterFunc", "tokio DelayQueue")
_OF_PYTHON = ("asyncio", "uvloop", "threading.Timer")

_TIMER = About(
    command="python -m benchmarks.timer",
    minutes="`--quick` takes about three minutes and needs a JDK, Go and Rust; `--no-rivals` does "
    "without them.",
    rivals="The rivals and their versions are above: Netty, Kafka, the JDK, Go, tokio, and the "
    "timers of Python.",
    losses="Each call crosses from Python into C, and each timeout is a Python object with a "
    "reference to its task. Timers in Java and Rust need neither.",
    wins="Beside all timers of Python: nothing is sorted, and no Python code runs in a start or "
    "cancel.",
    pictures=(
        Picture(
            "timer-pair.svg",
            "Start and cancel a timeout, ns, 1,000 pending",
            Source("Start and cancel, ns"),
            ("pair, 1,000 pending", "delays vary"),
            logarithmic=True,
        ),
        Picture(
            "timer-firing.svg",
            "Firing a timeout, ns",
            Source("Firing, ns"),
            ("on time", "backlog"),
            logarithmic=True,
        ),
        Picture(
            "timer-pending.svg",
            "1,000,000 pending timeouts",
            Source("1,000,000 pending"),
            ("bytes each", "idle CPU, ms/s"),
        ),
    ),
    comparisons=(
        *(
            Comparison(what, Source(section), column, "HierarchicalWheel", others)
            for what, section, column, others in (
                (
                    "start and cancel, delays vary, ns",
                    "Start and cancel, ns",
                    "delays vary",
                    (*_NETTY, *_OTHERS, *_OF_PYTHON),
                ),
                (
                    "firing, on time, ns",
                    "Firing, ns",
                    "on time",
                    (*_NETTY, *_OTHERS, "asyncio", "uvloop"),
                ),
                (
                    "memory of a pending timeout, bytes",
                    "1,000,000 pending",
                    "bytes each",
                    ("Netty, 65,536 slots", *_OTHERS, "asyncio", "uvloop"),
                ),
            )
        ),
    ),
)

# overload

_HANDLERS = {
    "`grpc`, handlers that wait, 4 at a time": "`grpc`, waiting handlers",
    "`grpc.aio`, handlers that wait, 4 at a time": "`grpc.aio`, waiting handlers",
    "`grpc`, handlers that burn 10 ms of CPU": "`grpc`, computing handlers",
    "`grpc.aio`, handlers that burn 10 ms of CPU": "`grpc.aio`, computing handlers",
    "`grpc`, handlers that wait, each a different time, 4 at a time": (
        "`grpc`, handlers that wait for different times"
    ),
    "`grpc.aio`, handlers that wait, each a different time, 4 at a time": (
        "`grpc.aio`, handlers that wait for different times"
    ),
    "`grpc`, handlers that burn CPU, each a different time": (
        "`grpc`, handlers that compute for different times"
    ),
    "`grpc.aio`, handlers that burn CPU, each a different time": (
        "`grpc.aio`, handlers that compute for different times"
    ),
}

_OUTAGES = {
    "A server that answers each call with UNAVAILABLE": "outage, UNAVAILABLE",
    "The same, with callers that wait longer": "outage, callers that wait 5 s",
    "A server whose handlers take until the deadline": "outage, handlers hang",
    "A server that is killed and started again": "outage, killed",
    "A server whose process is stopped (SIGSTOP)": "outage, frozen",
}

_OVERLOAD = About(
    command="python -m benchmarks.overload --seconds 4 --only "
    "phases,interval,varied,halved,downstream,spike,chain,sweep",
    minutes="It takes 44 minutes; a whole run, with phases of 10 s and the clients, about 100.",
    rivals="The rivals are grpcio without and with `maximum_concurrent_rpcs` (the best number for "
    "these handlers, found by trying), and for clients naive retries; the version is above.",
    losses="The adaptive limit has to find the number that the fixed one was given, so it lets "
    "calls wait longer. A client with a circuit breaker learns later that a server has returned "
    "than one that never stops trying.",
    wins="Beside a bare server, which answers nearly nothing when it is overloaded, and without a "
    "number that somebody has to find. A server that is down gets few calls from clients with a "
    "circuit breaker.",
    comparisons=(
        *(
            Comparison(
                f"{what}, {about}, {phase}",
                Source(section, "server, client (capacity)", names=2),
                column,
                f"adaptive, plain, {phase}",
                (f"fixed, plain, {phase}", f"bare, plain, {phase}"),
                more_is_better=more,
            )
            for section, about in _HANDLERS.items()
            for phase in ("2x", "10x")
            for what, column, more in (
                ("goodput", "goodput", True),
                ("p99 in ms", "p99, ms", False),
            )
        ),
        *(
            Comparison(
                f"{about}, {name}: {what}",
                Source(f"{section}, {name}", "client"),
                column,
                "Kit(retry, breaker)",
                ("plain", "naive retries"),
                more_is_better=more,
            )
            for section, about in _OUTAGES.items()
            for name in _WORLDS.values()
            for what, column, more in (
                ("calls and retries that are sent", "sent", False),
                ("answered in the first second after it", "answered, 1. s", True),
            )
        ),
    ),
)

# capacity

_CAPACITY = About(
    command="python -m benchmarks.capacity",
    minutes="`--quick` takes two minutes; a whole run about ten.",
    rivals="Nothing is timed, so the load of the machine does not matter. The rival is grpcio "
    "without rpcwheel; its version is above.",
    losses="What rpcwheel keeps for each connection and each call comes on top of what gRPC keeps.",
    wins="Nothing: gRPC without rpcwheel always occupies less.",
    pictures=(
        Picture(
            "capacity-memory.svg",
            "Memory of one, bytes",
            Source("Memory and descriptors", "each"),
            ("bytes",),
            logarithmic=True,
        ),
        Picture(
            "capacity-disk.svg",
            "A call in a journal, 300 bytes of request",
            Source("A journal", "engine"),
            ("bytes of a stored call", "after its delivery"),
        ),
    ),
    comparisons=(
        Comparison(
            "a connection of a client, bytes",
            Source("Memory and descriptors", "each"),
            "bytes",
            "connection, `kit.channel`",
            ("connection, bare channel",),
        ),
        Comparison(
            "a connection of a server, bytes",
            Source("Memory and descriptors", "each"),
            "bytes",
            "connection of a server with `idle`",
            ("connection of a server, bare",),
        ),
    ),
)

PAGES = {
    "calls": _CALLS,
    "capacity": _CAPACITY,
    "connections": _CONNECTIONS,
    "failback": _FAILBACK,
    "journal": _JOURNAL,
    "overload": _OVERLOAD,
    "registries": _REGISTRIES,
    "timer": _TIMER,
}
"""What is added to each page, by its name."""
