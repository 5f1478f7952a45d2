"""What stands below the figures: how they were taken."""

from __future__ import annotations

from benchmarks.connections.scale import Scale

NOTES = """\
How it is measured:

* All over loopback; client and server are processes of their own. CPU is user and system time of
  the whole process that is meant, gRPC's threads too.
* Heartbeats: {channels:,} channels, each with a connection of its own, are used once; then all are
  attached at once. An interval of {interval:g} s and a half are let go by, then measured:
  {intervals}; all subjects run at the same time, each in its own process, and beside them those of
  the server that is frozen, which mostly wait too. "1,000 at 60 s": what is
  more than without heartbeats, scaled to that. "Each": the same, by the heartbeats that were sent;
  its ratio is to a thread, or a task, for each channel, spread: bare calls, one at a time. A
  heartbeat is never early, and late by a random share of up to a third of the interval, the first
  by up to a whole one: what that brings on average is "expected", and in so few intervals the first
  ones still show in the tenths. gRPC's pings are counted by channelz where they are sent; who
  serves does not see them. A thread, or a task, for each channel sleeps and calls `Check`; all at
  the same moment, or spread over the interval: calls that follow one another find the processor's
  caches warm.
* Unary calls, and those through the server's interceptors: in bursts of {calls} that take turns,
  {rounds} rounds; ratios are medians of those within a round, with the middle half of them. The
  client's process is what is told of in the one table, the server's in the other.
* A new connection: `reconnect()` and a call, beside `close()`, another channel, and a call; with
  `grpc.use_local_subchannel_pool` ("own connection") and without, {replacements} of each.
* After an outage of {outage:g} s, in which each made calls that failed: how long until one that
  waits is answered, {outages} times. The server is back from the first moment on.
* A server is frozen with SIGSTOP, {freezes} times; whoever connects anew to its address finds
  another. Heartbeats and pings each {beat:g} s, dead after {dead:g} s of silence; waited for
  {patience:g} s at most, and who was that slow not asked again.
* The detector: {connections:,} gRPC channels that were used; a look is `check()`. Then half are
  used again, and a look closes the other half: "all gone" is when their descriptors are free.
* Connections that come and go: one in five a gRPC channel with a call, the others raw sockets,
  with HTTP/2's first bytes or without; a tenth as many went before them. The detector looks
  twice a second.
"""


def notes(scale: Scale) -> str:
    """The notes on a run."""
    return NOTES.format(
        channels=scale.channels,
        interval=scale.interval_s,
        intervals=scale.intervals,
        calls=scale.calls,
        rounds=scale.rounds,
        replacements=scale.replacements,
        outage=scale.outage_s,
        outages=scale.outages,
        freezes=scale.freezes,
        beat=scale.beat_s,
        dead=scale.dead_s,
        patience=scale.patience_s,
        connections=scale.connections,
    )
