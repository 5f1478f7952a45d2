"""Options of channels and servers that fit each other, and a check of those that you have.

gRPC takes any option and tells of none that it ignores. Here are presets of those that work
(`presets.py`), and `check_options`, which says what does not (`check.py`). What is said of gRPC was
measured with the version in `names.py`; tests/interop/grpcio tells when it is no longer so, and
docs/grpcio.md has the figures.

    channel = grpc.insecure_channel(target, options=channel_options(preset="lan"))
    server = grpc.server(pool, options=server_options(preset="lan"))
    for finding in check_options(channel=my_options, server=its_options):
        print(finding)

Each preset for a channel fits each one for a server. Of two options of one name gRPC takes the
first: put what is to win before a preset, `[("grpc.keepalive_time_ms", 20_000), *preset]`.
"""

from .check import Finding, check_options
from .presets import channel_options, server_options

__all__ = ["Finding", "channel_options", "check_options", "server_options"]
