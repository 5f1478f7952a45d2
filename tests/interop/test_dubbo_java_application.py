"""Providers in Dubbo Java 3.3.6 that are registered at the application level only.

One keeps its metadata to itself, as is Dubbo's default, and one writes them to ZooKeeper.
"""

import contextlib
import json

import pytest

import rpcwheel
from fixtures.dubbo_java import (
    BUILD_S,
    INTERFACE,
    PLACE,
    SERVICE,
    START_S,
    JavaProgram,
    Load,
    dubbo_jar,
    dubbo_zookeeper,
    order,
    read,
)
from fixtures.ports import free_port
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import RetryPolicy
from rpcwheel.cli import main

__all__ = ["dubbo_jar", "dubbo_zookeeper"]

pytestmark = pytest.mark.timeout(BUILD_S + 8 * WAIT_S)  # the programs are built first


@pytest.fixture
def start(dubbo_jar, dubbo_zookeeper):
    """Starts providers by name and port, which are killed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(server, port, **properties):
            settings = {"server": server, "port": port, "level": "instance"} | properties
            return stack.enter_context(
                JavaProgram(dubbo_jar, "Provider", dubbo_zookeeper, **settings)
            )

        yield start


def test_providers_at_the_application_level_are_called_stopped_and_restarted(
    dubbo_zookeeper, start, capsys
):
    """No call fails while one is stopped and started again, with a tag."""
    port = free_port()
    local, remote = start("local", port), start("remote", free_port(), metadata="remote")
    for provider in (local, remote):
        provider.wait_for("serving")
    url = dubbo_zookeeper.url(SERVICE, interface=INTERFACE, application="py-client")
    retry = RetryPolicy(retry_on="UNAVAILABLE", max_attempts=4, backoff=0.01)

    def calls_with(tag):
        place, metadata = channel.unary_unary(PLACE), (("dubbo.tag", tag),)
        return {read(place(order("a"), timeout=WAIT_S, metadata=metadata))[0] for _ in range(20)}

    with (
        rpcwheel.Kit(retry=retry, idempotent=True) as kit,
        kit.channel(url) as channel,
        Load(channel, threads=1) as load,
    ):
        load.wait_until_answered_only_by("local", "remote")
        assert main(["registry", "ls", dubbo_zookeeper.url(), "--json"]) == 0
        assert INTERFACE in json.dumps(json.loads(capsys.readouterr().out))
        local.process.terminate()
        load.wait_until_answered_only_by("remote")
        local.process.wait(START_S)
        start("restarted", port, tag="blue").wait_for("serving")
        assert wait_until(lambda: calls_with("blue") == {"restarted"})
        assert calls_with("green") == {"remote"}
        load.wait_until_answered_only_by("remote")
