"""The notes below the figures: how they are measured."""

from __future__ import annotations

from benchmarks.connections.scale import Scale

NOTES = """\
How it is measured:

* All traffic goes over loopback. Client and server are separate processes. CPU is user and system
  time of the whole measured process, with gRPC's threads.
* Heartbeats: {channels:,} channels, each with its own connection, are used once. Then all of them
  are attached at the same time. After one and a half intervals of {interval:g} s, {intervals}
  interval(s) are measured. All subjects run at the same time, each in its own process, together
  with the subjects of the frozen server, which mostly wait.
  * "1,000 at 60 s": the CPU time above that without heartbeats, scaled to 1,000 channels and 60
    s.
  * "each": the same, divided by the number of heartbeats sent. Its ratio is to a thread (or task)
    for each channel, spread: plain calls, one at a time.
  * "expected": a heartbeat is never early. It is late by a random share of up to a third of the
    interval, the first one by up to a whole interval. In so few intervals, the first heartbeats
    still influence the tenths.
  * gRPC's pings are counted by channelz in the client, because the server does not see them.
  * A thread (or task) for each channel sleeps and calls `Check`, all at the same moment, or
    spread over the interval. Calls that follow one another profit from the processor's caches.
* Unary calls, and calls through interceptors of the server: bursts of {calls} calls that take
  turns, {rounds} rounds. Ratios are medians of the ratios within a round, with their quartiles.
  One table shows the process of the client, the other that of the server.
* A new connection: `reconnect()` and a call, compared with `close()`, a new channel and a call;
  with `grpc.use_local_subchannel_pool` ("own connection") and without, {replacements} of each.
* After an outage of {outage:g} s, during which each channel made calls that failed: the time
  until a waiting call is answered, {outages} times. The server is back from the first moment of
  the measurement.
* A frozen server: it is stopped with SIGSTOP, {freezes} times. New connections to its address
  reach another server. Heartbeats and pings are sent each {beat:g} s, and a connection is dead
  after {dead:g} s of silence. The limit is {timeout:g} s; a subject that reached it was not
  measured again.
* The detector: {connections:,} gRPC channels that were used; one check is `check()`. Then half of
  them are used again, and a check closes the other half. "all freed" is when their descriptors
  are free.
* Opened and closed connections: one in five is a gRPC channel with a call. The others are raw
  sockets, with or without the first bytes of HTTP/2. A tenth of the number runs before as a
  warm-up. The detector checks twice a second.
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
        timeout=scale.timeout_s,
        connections=scale.connections,
    )
