"""What interceptors cost a call: rpcwheel's beside a no-op, grpc-interceptor and OpenTelemetry.

`python -m benchmarks.calls` runs all of it, prints the figures, and writes them to
`docs/benchmarks/calls.md`. Each world (`grpc`, `grpc.aio`) and each side (client, server) is
measured in a process of its own (`child.py`), against a far side in another process (`server.py`,
`far.py`), so that the CPU time of one is not in the other's.

How to read the figures. The subjects take turns in short bursts, in another order each round
(`turns.py`): a machine that slows down slows all of them. What is compared with the no-op
interceptor is compared within its round, and the median of these ratios is quoted with the middle
half of them, which says how far to trust it. CPU time is that of the whole process that is
measured, gRPC's own threads too; wall time has the far side and the way there in it as well. The
cycle collector runs as it does in any program, and begins each burst with nothing to do.

`scale.py` says how much is measured, `subjects.py` who, `rivals.py` and `own.py` what they are
made of, `sync_client.py`, `aio_client.py` and `servers.py` how; `verdict.py` holds the targets.
"""
