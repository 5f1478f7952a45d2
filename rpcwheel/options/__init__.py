"""Options for channels and servers that work together, and a check of your own options.

gRPC accepts any option and ignores those that it does not know. `channel_options` and
`server_options` make options that have an effect. `check_options` finds options without an effect,
and options of a channel and a server that do not fit together. The behavior of gRPC was measured
with the version in `names.py`; the tests in tests/interop/grpcio fail when it changes, and
docs/grpcio.md has the figures.

    channel = grpc.insecure_channel(target, options=channel_options(preset="lan"))
    server = grpc.server(pool, options=server_options(preset="lan"))
    for finding in check_options(channel=my_options, server=its_options):
        print(finding)

Each channel preset fits each server preset. If an option is given twice, gRPC uses the first. So
put options that override a preset before it: `[("grpc.keepalive_time_ms", 20_000), *preset]`.
"""

from .check import Finding, check_options
from .presets import channel_options, server_options

__all__ = ["Finding", "channel_options", "check_options", "server_options"]
