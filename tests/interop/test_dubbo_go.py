"""dubbo-go 3.3.1: its consumer calls servers that are published here, and clients its provider."""

import contextlib
from functools import partial

import grpc
import pytest

from fixtures.dubbo_go import BUILD_S, GoProgram, dubbo_go
from fixtures.dubbo_java import (
    GROUP,
    PLACE,
    SERVICE,
    VERSION,
    call_all_kinds,
    dubbo_zookeeper,
    order,
    published,
    texts,
    wait_until_called,
)
from fixtures.ports import free_port
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.registry import RegistryPolicy

__all__ = ["dubbo_go", "dubbo_zookeeper"]

pytestmark = pytest.mark.timeout(BUILD_S + 6 * WAIT_S)  # the programs are built first

LEVELS = ["service", "interface", "all"]
"""The registration of dubbo-go; "service" is its default, and Dubbo's application level."""


@pytest.fixture
def serve(dubbo_zookeeper):
    """Starts servers in Python that are published until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield partial(published, stack, dubbo_zookeeper, interface=None)


@pytest.fixture
def run(dubbo_go, dubbo_zookeeper):
    """Starts one of the programs in Go."""
    return partial(GoProgram, dubbo_go, zookeeper=dubbo_zookeeper, version=VERSION)


# The consumer in Go, servers in Python


@pytest.mark.parametrize("level", LEVELS)
def test_a_go_consumer_calls_all_kinds_of_methods(serve, run, level):
    orders, _ = serve("py")
    with run("consumer", level=level, group=GROUP) as consumer:
        consumer.wait_for("ready")
        wait_until_called(consumer, "py")
        assert consumer.ask("place hello") == "py: hello"
        assert consumer.ask("watch 3") == "py: 1; py: 2; py: 3"
        assert consumer.ask("upload a b c") == "py: abc"
        assert consumer.ask("chat a b") == "py: a; py: b"
        before = len(orders.seen)
        assert consumer.ask("place fail:INVALID_ARGUMENT").startswith("! invalid_argument")
        assert len(orders.seen) == before + 3  # it retries what a server answers
        assert consumer.ask("attach trace-id=42") == "attached"
        consumer.ask("place hello")
    seen = orders.seen[-1]
    assert seen["trace-id"] == "42"
    assert (seen["tri-service-group"], seen["tri-service-version"]) == (GROUP, VERSION)
    assert 0 < float(seen["time_remaining"]) <= 3.0


def test_a_go_consumer_calls_all_servers_that_share_a_revision(serve, run):
    """They differ only in their host, as the pods of a deployment do."""
    port = free_port()
    for host in ("127.0.0.1", "127.0.0.2"):
        serve(host, group="g6", host=host, port=port)
    with run("consumer", level="service", group="g6") as consumer:
        consumer.wait_for("ready")
        wait_until_called(consumer, "127.0.0.1")
        wait_until_called(consumer, "127.0.0.2")


def test_no_call_of_a_go_consumer_fails_while_servers_are_replaced(serve, run):
    settings = {"lame_duck": None, "grace": 10.0, "group": "g3"}
    _, old = serve("old", **settings)
    with run("consumer", level="all", group="g3") as consumer:
        consumer.wait_for("ready")
        wait_until_called(consumer, "old")
        consumer.tell("load 20")
        new, _ = serve("new", **settings)
        assert wait_until(lambda: new.seen)
        old.stop()
        answered = consumer.answer()
    assert "old:" in answered
    assert "new:" in answered
    assert "!" not in answered


# The provider in Go, clients in Python


@pytest.fixture
def go_channel(world, dubbo_zookeeper):
    """Opens a channel to providers of a group."""

    def go_channel(group, **options):
        url = dubbo_zookeeper.url(
            SERVICE, group=group, version=VERSION, application="py-client", **options
        )
        policy = RegistryPolicy(snapshot=False)
        return world.keep(world.do(lambda: world.api.insecure_channel(url, registry_policy=policy)))

    return go_channel


def wait_until_answered(world, channel):
    """Wait until a provider answers, which may not be published yet."""

    def is_answered():
        call = world.call(channel, "unary_unary", order("a"), method=PLACE, timeout=WAIT_S)
        with contextlib.suppress(grpc.RpcError):
            return call.result()

    assert wait_until(is_answered)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ({"level": "all"}, {}),
        ({"level": "interface"}, {"level": "interface"}),
        ({"level": "service", "metadata": "remote"}, {"level": "application"}),
    ],
    ids=["both levels", "interface level", "application level"],
)
def test_every_kind_of_call_to_a_go_provider_is_answered(world, run, go_channel, flags, options):
    group = f"go-{world.name}-{flags['level']}"
    channel = go_channel(group, **options)
    # dubbo-go's revision of the metadata of an application does not depend on the group
    flags = flags | {"port": free_port(), "group": group, "application": group}
    with run("provider", **flags):
        wait_until_answered(world, channel)
        answered = call_all_kinds(world, channel)
        metadata = (("trace-id", "42"),)
        (attachments,) = texts(
            world.call(
                channel, "unary_unary", order("attachments"), method=PLACE, metadata=metadata,
                timeout=WAIT_S,
            )
        )  # fmt: skip
        failing = world.call(channel, "unary_unary", order("fail"), method=PLACE, timeout=WAIT_S)
        error = failing.error()
    assert answered == [["a"], ["1", "2", "3"], ["ab"], ["a", "b"]]
    assert "trace-id=[42]" in attachments
    assert (error.code(), error.details()) == (grpc.StatusCode.UNKNOWN, "failed as asked")
