"""Dubbo Java 3.3.6: its consumer calls servers that are published here, and clients its provider.

In the default settings of Dubbo, unless a test says otherwise.
"""

import contextlib
import json
import logging
import os
from functools import partial

import grpc
import pytest

import rpcwheel
from fixtures.dubbo_java import (
    BUILD_S,
    GROUP,
    INTERFACE,
    OPTIONS,
    PLACE,
    SERVICE,
    START_S,
    VERSION,
    JavaProgram,
    Load,
    call_all_kinds,
    dubbo_jar,
    dubbo_zookeeper,
    java_consumer,
    java_provider,
    order,
    published,
    texts,
    wait_until_called,
)
from fixtures.ports import free_port
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import RetryPolicy
from rpcwheel.cli import main

__all__ = ["dubbo_jar", "dubbo_zookeeper", "java_consumer", "java_provider"]

RESTARTS = int(os.environ.get("TEST_RESTARTS", "2"))
"""Of providers in Java; 20 take 7 minutes. `--log-cli-level=INFO` shows the number of calls."""

pytestmark = pytest.mark.timeout(BUILD_S + 6 * WAIT_S)  # the programs are built first


@pytest.fixture
def serve(dubbo_zookeeper):
    """Starts servers that are published until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield partial(published, stack, dubbo_zookeeper)


@pytest.fixture(scope="module")
def orders(dubbo_zookeeper, java_consumer):
    """A server that the consumer calls, for all tests."""
    with contextlib.ExitStack() as stack:
        orders, _ = published(stack, dubbo_zookeeper, "py")
        wait_until_called(java_consumer, "py")
        yield orders


def wait_until_not_called(consumer, *names):
    """Wait until the consumer has called none of these servers in a row of calls."""

    def has_not_called():
        return not {consumer.ask("place hello").partition(":")[0] for _ in range(20)} & set(names)

    assert wait_until(has_not_called)


# The consumer in Java, servers in Python


@pytest.mark.usefixtures("orders")
def test_a_java_consumer_calls_all_kinds_of_methods(java_consumer):
    assert java_consumer.ask("place hello") == "py: hello served-by=py"
    assert java_consumer.ask("watch 3") == "py: 1; py: 2; py: 3; "
    assert java_consumer.ask("upload a b c") == "py: abc; "
    assert java_consumer.ask("chat a b") == "py: a; py: b; "


def test_attachments_arrive_as_metadata_with_the_deadline_and_the_service(orders, java_consumer):
    assert java_consumer.ask("attach trace-id=42") == "attached"
    assert java_consumer.ask("attach Mixed-Case=yes") == "attached"
    java_consumer.ask("place hello")
    seen = orders.seen[-1]
    assert seen["trace-id"] == "42"
    assert seen["mixed-case"] == "yes"
    assert "Mixed-Case" in seen["tri-header-convert"]
    assert seen["tri-consumer-appname"] == "java-consumer"
    assert seen["tri-service-group"] == GROUP
    assert seen["tri-service-version"] == VERSION
    assert 0 < float(seen["time_remaining"]) <= 1.0


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "UNAVAILABLE", "RESOURCE_EXHAUSTED"])
def test_a_java_consumer_gets_the_status_and_does_not_retry_it(orders, java_consumer, code):
    before = len(orders.seen)
    assert "StatusRpcException code" in (said := java_consumer.ask(f"place fail:{code}"))
    assert f"{code} : failed as asked" in said
    assert len(orders.seen) == before + 1


def test_a_java_consumer_retries_its_timeouts_only(orders, java_consumer):
    def attempts():  # on a busy machine, one may reach the server only after its timeout
        before = len(orders.seen)
        assert "RpcException code 2" in java_consumer.ask("place hang")
        return len(orders.seen) - before

    assert wait_until(lambda: attempts() > 1)


@pytest.mark.usefixtures("orders")
def test_group_version_and_status_select_servers(serve, java_consumer):
    others = [serve("other", group="another"), serve("older", version="1.1")]
    _, publisher = serve("second")
    wait_until_called(java_consumer, "py", "second")
    assert not any(other.seen for other, _ in others)
    (registration,) = publisher.registrations
    registration.update(status="DRAINING")
    wait_until_not_called(java_consumer, "second")


@pytest.mark.usefixtures("orders")
def test_a_tag_selects_its_servers(serve, java_consumer):
    serve("blue", metadata={"dubbo.tag": "blue"})

    def blue():
        java_consumer.ask("attach dubbo.tag=blue")
        return java_consumer.ask("place hello")

    assert wait_until(lambda: blue().startswith("blue"))
    wait_until_not_called(java_consumer, "blue")
    java_consumer.ask("attach dubbo.tag=red")
    assert java_consumer.ask("place hello").startswith("py")


def test_no_call_fails_while_servers_are_replaced(serve, java_consumer):
    """With the default lame duck, which is as long as a consumer may take to hear of a change."""
    settings = {"lame_duck": None, "grace": 10.0}
    _, old = serve("old", **settings)
    wait_until_called(java_consumer, "old")
    java_consumer.tell("load 25")
    new, _ = serve("new", **settings)
    assert wait_until(lambda: new.seen)
    old.stop()
    answered = java_consumer.answer()
    assert "old=" in answered
    assert "new=" in answered
    assert "!" not in answered


# The provider in Java, clients in Python


@pytest.fixture
def java_channel(world, dubbo_zookeeper, java_provider):
    """A channel to the provider in Java, by the name of its service."""
    url = dubbo_zookeeper.url(SERVICE, **OPTIONS | {"group": "g2"}, application="py-client")
    return world.keep(world.do(world.api.insecure_channel, url))


def test_every_kind_of_call_to_a_java_provider_is_answered(world, java_channel):
    answered = call_all_kinds(world, java_channel)
    assert answered == [["a"], ["1", "2", "3"], ["ab"], ["a", "b"]]


def test_metadata_are_attachments_of_a_java_provider_and_back(world, java_channel):
    convert = '{"mixed-case": "Mixed-Case"}'
    metadata = (("trace-id", "42"), ("mixed-case", "yes"), ("tri-header-convert", convert))
    call = world.call(
        java_channel, "unary_unary", order("attachments"), method=PLACE, metadata=metadata,
        timeout=WAIT_S,
    )  # fmt: skip
    (text,) = texts(call)
    seen = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert seen["trace-id"] == "42"
    assert seen["Mixed-Case"] == "yes"
    assert seen["remote.application"] == "py-client"
    assert call.trailing_metadata()["served-by"] == "java"


@pytest.mark.parametrize(
    ("item", "code", "details"),
    [
        ("fail:INVALID_ARGUMENT", "INVALID_ARGUMENT", "INVALID_ARGUMENT : failed as asked"),
        ("fail:RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED : failed as asked"),
        ("throw", "UNKNOWN", "thrown as asked"),
    ],
)
def test_what_a_java_provider_throws_is_a_status(world, java_channel, item, code, details):
    call = world.call(java_channel, "unary_unary", order(item), method=PLACE, timeout=WAIT_S)
    error = call.error()
    assert (error.code().name, error.details()) == (code, details)


def test_a_deadline_ends_a_call_to_a_java_provider(world, java_channel):
    world.call(java_channel, "unary_unary", order("a"), method=PLACE, timeout=WAIT_S).result()
    call = world.call(java_channel, "unary_unary", order("sleep:3000"), method=PLACE, timeout=0.3)
    assert call.error().code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_java_provider_without_health_service_is_healthy(world, java_channel):
    world.call(java_channel, "unary_unary", order("a"), method=PLACE, timeout=WAIT_S).result()
    (subchannel,) = java_channel.subchannels
    world.do(subchannel.mark_unhealthy)
    assert wait_until(lambda: subchannel.healthy)


@pytest.fixture
def start_provider(dubbo_jar, dubbo_zookeeper):
    """Starts providers in Java. At the end they are stopped, so that none stays registered."""
    with contextlib.ExitStack() as stack:

        def start_provider(server, group, port=None):
            port = free_port() if port is None else port
            settings = {"port": port, "group": group, "server": server}
            provider = JavaProgram(dubbo_jar, "Provider", dubbo_zookeeper, **settings)
            stack.enter_context(provider).wait_for("serving")
            stack.callback(stop, provider)
            return provider

        yield start_provider


@pytest.fixture
def open_group(dubbo_zookeeper):
    """Opens a channel to a group, with the retry policy of the documentation."""
    retry = RetryPolicy(retry_on="UNAVAILABLE")
    with rpcwheel.Kit(retry=retry, idempotent=True) as kit, contextlib.ExitStack() as stack:

        def open_group(group):
            url = dubbo_zookeeper.url(SERVICE, **OPTIONS | {"group": group})
            return stack.enter_context(kit.channel(url))

        yield open_group


def stop(provider):
    """Stop a provider as systemd and Kubernetes do."""
    provider.process.terminate()
    provider.process.wait(START_S)


def test_no_call_fails_when_a_java_provider_is_stopped(serve, start_provider, open_group):
    """Its calls go to a server in Python."""
    serve("py", group="g3")
    provider = start_provider("java", "g3")
    with Load(open_group("g3"), threads=1) as load:
        load.wait_until_answered_by("java", "py")
        stop(provider)
        load.wait_until_answered_by("py")
        start = len(load.answered)
        assert wait_until(lambda: len(load.answered) > start + 50)
        assert set(load.answered[start:]) == {"py"}


@pytest.mark.timeout(BUILD_S + RESTARTS * START_S)
def test_no_call_fails_while_java_providers_are_restarted(start_provider, open_group):
    """Each at the port of its predecessor, as most are."""
    ports = free_port(), free_port()
    providers = [start_provider(f"java-{number}", "g5", ports[number]) for number in (0, 1)]
    with Load(open_group("g5"), threads=4) as load:
        load.wait_until_answered_by("java-0", "java-1")
        for number in range(RESTARTS):
            stop(providers[number % 2])
            server = f"java-{number + 2}"
            providers[number % 2] = start_provider(server, "g5", ports[number % 2])
            load.wait_until_answered_by(server)
    logging.getLogger(__name__).info("%d restarts, %d calls", RESTARTS, len(load.answered))
    assert set(load.answered) == {f"java-{number}" for number in range(RESTARTS + 2)}


def test_a_java_consumer_finds_a_server_at_the_application_level(dubbo_zookeeper, dubbo_jar, serve):
    """Only there, and by the name of the interface, as Dubbo 3.3.6 looks it up by the path."""
    level = {"dubbo.application.service-discovery.migration": "FORCE_APPLICATION"}
    orders, _ = serve("applied", service=INTERFACE, group="g4")
    with JavaProgram(dubbo_jar, "Consumer", dubbo_zookeeper, group="g4", **level) as consumer:
        consumer.wait_for("ready")
        wait_until_called(consumer, "applied")
    assert orders.seen[0]["tri-service-group"] == "g4"


# The command line


@pytest.mark.usefixtures("java_provider", "java_consumer")
def test_the_command_line_shows_a_java_provider_and_a_java_consumer(dubbo_zookeeper, capsys):
    assert main(["registry", "ls", dubbo_zookeeper.url(), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    metadata = [instance["metadata"] for instance in shown["services"][INTERFACE]]
    assert "java-shop" in [each.get("dubbo.application") for each in metadata]
    (consumer,) = shown["consumers"]
    assert (consumer["service"], consumer["application"]) == (INTERFACE, "java-consumer")
    assert (consumer["version"], consumer["group"]) == (VERSION, GROUP)
