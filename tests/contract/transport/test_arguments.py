"""Arguments that `ReconnectingChannel` refuses in both worlds, and the messages."""

import grpc
import pytest

import rpcwheel.transport
import rpcwheel.transport.aio
from rpcwheel.errors import ConfigurationError

NEW = [
    ({"target": None}, TypeError, "target must be a string such as"),
    ({"target": b"shop:1"}, TypeError, "target must be a string such as"),
    ({"target": ""}, ConfigurationError, "target must not be empty"),
    ({"credentials": "tls"}, TypeError, "credentials must be grpc.ChannelCredentials"),
    ({"compression": "gzip"}, TypeError, "compression must be a grpc.Compression"),
    ({"options": {"grpc.enable_retries": 0}}, TypeError, "options must be pairs"),
    ({"options": ["grpc.enable_retries"]}, TypeError, "options must be pairs"),
    ({"options": [("grpc.a",)]}, TypeError, "options must be pairs"),
    ({"options": [(1, 2)]}, TypeError, "options must be pairs"),
    ({"connect": "127.0.0.1:1"}, TypeError, "connect must be callable"),
    (
        {"connect": print, "compression": grpc.Compression.Gzip},
        ConfigurationError,
        "compression: not allowed together with connect",
    ),
    (
        {"connect": print, "credentials": grpc.ssl_channel_credentials()},
        ConfigurationError,
        "credentials: not allowed together with connect",
    ),
    ({"backoff": "1 s"}, TypeError, "backoff: wait must be seconds"),
    ({"backoff": -1}, ConfigurationError, "backoff: wait must not be negative"),
    ({"timer": 1.0}, TypeError, "timer must be a WheelTimer"),
]
NEW_AIO = [
    (
        {"connect": print, "interceptors": [object()]},
        ConfigurationError,
        "interceptors: not allowed together with connect",
    ),
]
METHODS = [
    ("reconnect", {"drain_timeout": "1"}, TypeError, "drain_timeout must be seconds"),
    (
        "reconnect",
        {"drain_timeout": -1},
        ConfigurationError,
        "drain_timeout must be 0 seconds or more, or None",
    ),
    ("reconnect", {"drain_timeout": float("nan")}, ConfigurationError, "drain_timeout is NaN"),
    ("reconnect", {"reason": 7}, TypeError, "reason must be a string"),
    ("drain", {"drain_timeout": "1"}, TypeError, "drain_timeout must be seconds"),
    ("drain", {"drain_timeout": -1}, ConfigurationError, "drain_timeout must be 0 seconds or more"),
    ("drain", {"reason": 7}, TypeError, "reason must be a string"),
]


def check_refused(make, rows):
    for given, error, message in rows:
        with pytest.raises(error, match=message):
            make(**{"target": "127.0.0.1:1"} | given)


def test_a_channel_for_threads_refuses_wrong_arguments():
    check_refused(rpcwheel.transport.ReconnectingChannel, NEW)
    with rpcwheel.transport.ReconnectingChannel("127.0.0.1:1") as channel:
        for name, given, error, message in METHODS:
            with pytest.raises(error, match=message):
                getattr(channel, name)(**given)
        assert (channel.number, channel.closed, channel.accepts_calls) == (1, False, True)


async def test_a_channel_of_grpc_aio_refuses_wrong_arguments():
    check_refused(rpcwheel.transport.aio.ReconnectingChannel, NEW + NEW_AIO)
    async with rpcwheel.transport.aio.ReconnectingChannel("127.0.0.1:1") as channel:
        for name, given, error, message in METHODS:
            with pytest.raises(error, match=message):
                getattr(channel, name)(**given)
        with pytest.raises(ConfigurationError, match="grace must be 0 seconds or more"):
            await channel.close(-1)
        assert (channel.number, channel.closed) == (1, False)
