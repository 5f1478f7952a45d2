"""What interceptors cost a call, and what hedging gains.

`python -m benchmarks.calls` runs all steps, prints the figures, and writes them to
`docs/benchmarks/calls.md`. Each step runs in a process of its own (`child.py`), with its servers in
another process (`server_process.py`), so that the CPU time of the client and of the server are kept
apart.

Steps `client-*` and `server-*` compare rpcwheel with a no-op interceptor, grpc-interceptor and
OpenTelemetry, in both worlds (`grpc`, `grpc.aio`). The subjects take turns in short bursts, in
another order in each round (`turns.py`), so a machine that slows down slows all of them. Each
subject is compared with the no-op interceptor of the same round. The page has the median of these
ratios and their quartiles, which say how far to trust it. CPU time is that of the whole process
that is measured, with gRPC's threads; wall time includes the other process and the network. The
cycle collector runs as in any program, and starts each burst with nothing to do.

Steps `counts-*` measure what it costs to count calls (`counts.py`). All other steps run without
metrics (`RPCWHEEL_METRICS=off`).

Steps `hedging-*` make calls to a server that delays some of them, without and with hedging
(`hedging.py`, `slow_server.py`).

`scale.py` says how much is measured, `subjects.py` names the subjects, `rivals.py` and `own.py`
make their interceptors and channels, `sync_client.py`, `aio_client.py` and `servers.py` measure;
`verdict.py` holds the targets.
"""
