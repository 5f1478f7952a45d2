"""The page that a run writes: `docs/benchmarks/registries.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks import _page
from benchmarks._page import EMPTY, Origin, figure, quartiles, table, within
from benchmarks.calls.scale import Results, Row
from benchmarks.calls.wire import PAYLOAD
from benchmarks.registries.scale import Scale
from benchmarks.registries.subjects import (
    CHANNEL_PICK,
    CONVERGE,
    PICK,
    REPUBLISH,
    RESTART,
    UNARY,
)
from benchmarks.registries.verdict import TARGETS

NOTES = """\
How it is measured:

* A unary call: {payload} bytes over loopback, in bursts of {calls} calls. The subjects take
  turns, in another order in each round, {rounds} rounds. The process of the client (CPU: with
  gRPC's threads) is bound to one processor, the servers to another. "few" are {few} servers,
  "many" {many}, each on its own port; the registry is in memory. "× bare" is the median of the
  ratios within a round, with their quartiles. If these are far apart, other programs used the
  machine. grpc's list is `ipv4:host:port,...` with `round_robin`. "in turn" is a function that
  uses bare channels in turn and does nothing else: the cost of several connections in grpc
  itself. A channel to many servers has as many connections, whose memory is not in the
  processor's caches: compare it with grpc's own list of as many.
* A pick: CPU time of the picker alone, {picks} picks in a burst, with the call of the function
  and the loop. Other weights: 50 to 149. Prepared: at each change of the subchannels, for {most}
  of them. The subchannels are simple objects. `LeastRequest` reads the number of calls of each
  one, which takes longer with real subchannels.
* A pick of a channel: CPU time between a call and its subchannel, whose state is read. All
  instances are the same server, on real connections. Of {listed} instances the channel connects
  to 32 (`subset_size`), with `ring_hash` to those that are picked. Updated: one instance is
  replaced by another.
* Converging: one session publishes {instances:,} instances. There are {subscribers:,}
  subscriptions in {sessions} sessions with a connection each, all in one process (one interpreter
  reads each record {sessions} times), and the engine runs on the same machine. Measured until the
  last listener was called. Changed: the weight of one instance. Withdrawn: one instance. Medians
  of up to {changes}, and the longest. The alternatives have one watch, or poll, for each of as
  many sessions, call as many listeners, and do not handle failures; kazoo's recipe and the poll
  do not read records.
* Rolling restart: another process restarts {restarted:,} of {listed} instances, each as a server
  does: DRAINING, withdrawn, published again. CPU time of the client's process, with a channel by
  name or an alternative as above. kazoo's recipe reads all names at each change; the poll misses
  some.
* Published again: {publishers} sessions (in memory: one) with {instances:,} instances together, a
  lease of {lease:g} s and `jitter={window:g}`. The engine is killed, and started without its
  data. The time counts from when it answers. A session notices it with its next renewal, at most
  a third of the lease later, or through its watch or connection. A lookup each 10 ms counts the
  instances. A lookup in ZooKeeper reads every node and takes so long that its tenths are
  imprecise.
"""

Cell = Callable[[Row], str]


def page(
    results: Results,
    scale: Scale,
    *,
    origin: Origin,
) -> str:
    """The page, as Markdown."""
    parts = origin.parts("Channels by name: calls, picks, updates")
    verdicts = [target.verdict(results) for target in TARGETS]
    parts += ["## Target", table(("unary call", "measured", "target", ""), verdicts)]
    for title, what, columns in _sections(scale):
        tables = list(_tables(results, what, columns))
        parts += [f"## {title}", *tables] if tables else []
    return "\n\n".join([*parts, _notes(scale)])


def facts(load: str) -> dict[str, str]:
    """The machine and the versions, by name."""
    found = _page.facts("grpcio", "kazoo", "redis") | _page.engines("SQLite", "etcd", "Redis")
    return found | {"Load before": load}


def _tables(results: Results, what: str, columns: Sequence[tuple[str, Cell]]) -> Iterator[str]:
    for world, name in (("sync", "`grpc`"), ("aio", "`grpc.aio`")):
        rows = [row for row in results.rows if (row.measure, row.world) == (what, world)]
        if rows:
            title = name if what in (UNARY, CHANNEL_PICK) else ""
            lines = [(row.subject, *(cell(row) for _, cell in columns)) for row in rows]
            yield table((title, *(header for header, _ in columns)), lines)


def _value(key: str) -> Cell:
    return lambda row: figure(row.values.get(key))


def _within(key: str) -> Cell:
    return lambda row: within(row.values, key)


def _ratio(clock: str) -> Cell:
    return lambda row: quartiles(row.values, clock)


def _pair(key: str) -> Cell:
    """The median, and the longest; some see no such change."""

    def cell(row: Row) -> str:
        if f"{key}_ms" not in row.values:
            return EMPTY
        return f"{figure(row.values[f'{key}_ms'])} ({figure(row.values[f'{key}_most_ms'])})"

    return cell


def _sections(scale: Scale) -> Iterator[tuple[str, str, Sequence[tuple[str, Cell]]]]:
    yield (
        "A unary call",
        UNARY,
        (
            ("CPU, µs", _value("cpu_us")),
            ("× bare", _ratio("cpu")),
            ("wall, µs", _value("wall_us")),
            ("× bare", _ratio("wall")),
        ),
    )
    picked = [(f"of {size:,}, ns", _value(f"ns_{size}")) for size in scale.picked]
    yield "A pick", PICK, (*picked, ("prepared, µs", _value("prepare_us")))
    listed = [(f"of {size:,}, ns", _value(f"ns_{size}")) for size in (scale.few, scale.listed)]
    title = f"A pick of a channel with {scale.few} or {scale.listed:,} instances"
    yield title, CHANNEL_PICK, (*listed, ("updated, ms", _value("update_ms")))
    yield (
        f"{scale.subscribers:,} subscribers see {scale.instances:,} instances",
        CONVERGE,
        (
            ("all seen by all after, s", _within("all_s")),
            ("CPU for that, s", _value("cpu_s")),
            ("one changed, ms (longest)", _pair("change")),
            ("one withdrawn, ms (longest)", _pair("gone")),
            ("threads", _value("threads")),
        ),
    )
    title = f"A client during a rolling restart of {scale.listed:,} instances"
    yield title, RESTART, (("CPU for each instance, ms", _value("restart_ms")),)
    yield (
        f"{scale.instances:,} instances are published again",
        REPUBLISH,
        (
            ("the first after, s", _within("first_s")),
            ("all after, s", _within("all_s")),
            ("most in 0.1 s", _value("busiest")),
            ("tenths with any", _value("bins")),
        ),
    )


def _notes(scale: Scale) -> str:
    return NOTES.format(
        payload=len(PAYLOAD),
        calls=scale.calls,
        rounds=scale.rounds,
        few=scale.few,
        many=scale.many,
        picks=f"{scale.picks:,}",
        most=f"{max(scale.picked):,}",
        listed=f"{scale.listed:,}",
        restarted=scale.restarted,
        instances=scale.instances,
        subscribers=scale.subscribers,
        sessions=scale.sessions,
        changes=scale.changes,
        publishers=scale.publishers,
        lease=scale.lease_s,
        window=scale.window_s,
    )
