"""The end of health checks that do not run as usual, for `grpc` and for `grpc.aio`."""

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from rpcwheel._concurrency.exiting import BackgroundCalls
from rpcwheel.balancer import aio_channel, channel

SUBCHANNEL = SimpleNamespace(id="a", removed=False)


def connections_whose_connect_raises(module, error, **parts):
    pool = SimpleNamespace(name="shop", **parts)
    connections = module._Connections(pool, None, {}, None, None)
    connections.connection_of = Mock(side_effect=error)
    return connections


def test_a_check_whose_connect_raises_system_exit_ends(monkeypatch):
    background, error, ends = BackgroundCalls(), SystemExit(), []
    monkeypatch.setattr(channel, "BACKGROUND", background)
    connections = connections_whose_connect_raises(channel, error)
    with pytest.raises(SystemExit):
        connections.probe(SUBCHANNEL, 1.0, lambda *end: ends.append(end))
    assert ends == [(None, error)]
    assert background._in_flight() == []


async def test_a_check_that_is_canceled_before_its_first_step_ends():
    jobs = SimpleNamespace(enter=asyncio.get_running_loop)
    connections = connections_whose_connect_raises(aio_channel, ValueError(), jobs=jobs)
    end = asyncio.get_running_loop().create_future()
    connections.probe(SUBCHANNEL, 1.0, lambda *result: end.set_result(result))
    (task,) = connections.probes
    task.cancel()
    assert await end == (None, None)
    assert not connections.probes
