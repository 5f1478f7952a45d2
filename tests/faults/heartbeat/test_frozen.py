"""A server that is frozen, for real: every connection to it is open, and nothing answers.

A process gets SIGSTOP. Times are short, and nothing is asserted about them but that gRPC alone
would have waited for much longer.
"""

from fixtures.heartbeat_worlds import TIMEOUT, SyncClient
from fixtures.server_process import PING
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import Kit, RetryPolicy, aio
from rpcwheel.cli.audit_pb2 import Event
from rpcwheel.cli.audit_pb2_grpc import AuditStub
from rpcwheel.events import ConnectionAlive, ConnectionDead, ConnectionReplaced

REASON = "no answer to heartbeats"


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def test_a_call_in_flight_ends_and_the_next_is_answered_elsewhere(shop, name, open_client, events):
    frozen, other = shop
    client = open_client(name.target)
    assert client.ping().pid == frozen.pid
    calls = client.slow(), client.follow()
    name.to(other.target)
    frozen.stop()
    for call in calls:
        ended = call.ended()
        assert ended.code == "UNAVAILABLE"
        assert REASON in ended.details
    assert client.ping().pid == other.pid
    assert wait_until(lambda: client.state == "ALIVE")
    assert client.bare.number == client.heartbeat.replaced + 1 >= 2
    assert wait_until(lambda: of(events, ConnectionAlive))  # told in order
    dead = of(events, ConnectionDead)[0]
    assert (dead.target, dead.calls) == (name.target, 2)
    assert dead.silent_s > TIMEOUT
    assert wait_until(lambda: of(events, ConnectionReplaced))
    replaced = of(events, ConnectionReplaced)[0]
    assert (replaced.target, replaced.number) == (name.target, 2)
    assert REASON in replaced.reason


def test_a_dead_connection_is_replaced_although_nobody_calls(shop, name, open_client):
    frozen, other = shop
    client = open_client(name.target)
    assert client.ping().pid == frozen.pid
    name.to(other.target)
    frozen.stop()
    assert wait_until(lambda: client.bare.number >= 2 and client.state == "ALIVE")
    assert client.ping().pid == other.pid


def test_the_other_address_of_a_name_is_taken(shop, open_client):
    frozen, other = shop
    client = open_client(f"ipv4:{frozen.target},{other.target}")
    assert client.ping().pid == frozen.pid
    call = client.slow()
    frozen.stop()
    assert call.ended().code == "UNAVAILABLE"
    assert client.ping().pid == other.pid


def test_the_same_server_is_taken_again_once_it_is_thawed(server, open_client):
    client = open_client(server.target)
    assert client.ping().pid == server.pid
    call = client.slow()
    server.stop()
    assert call.ended().code == "UNAVAILABLE"
    server.cont()
    assert client.ping().pid == server.pid
    assert wait_until(lambda: client.state == "ALIVE")


def test_a_freeze_shorter_than_the_timeout_harms_nothing(server, open_client, events):
    client = open_client(server.target, interval=0.1, timeout=10 * WAIT_S)
    assert client.ping().pid == server.pid
    call = client.slow()
    server.stop()
    client.heartbeat.beat()
    assert wait_until(lambda: client.heartbeat.sent > client.heartbeat.answered)
    server.cont()
    answered = client.heartbeat.answered
    assert wait_until(lambda: client.heartbeat.answered > answered)
    assert not call.done.done()
    assert (client.bare.number, of(events, ConnectionDead)) == (1, [])


def test_a_thawed_old_connection_does_not_disturb_the_new_one(shop, name, open_client):
    """Its calls may end, as they were let; the new connection is judged by its own silence."""
    old, new = shop
    client = open_client(name.target, drain_timeout=None)
    assert client.ping().pid == old.pid
    stream, call = client.follow(0.02), client.slow(1.0)
    name.to(new.target)
    old.stop()
    assert wait_until(lambda: client.bare.number >= 2 and client.state == "ALIVE")
    old.cont()
    assert call.ended().pid == old.pid
    before = len(stream.messages)
    assert wait_until(lambda: len(stream.messages) > before + 10)
    number = client.bare.number
    new.stop()
    assert wait_until(lambda: client.bare.number > number), "the old stream kept the new one alive"
    assert not stream.done.done()
    new.cont()
    assert client.ping().pid == new.pid


def test_with_tls(certificates, start_server, open_proxy):
    frozen, other = (start_server(certificates=certificates) for _ in range(2))
    name = open_proxy(frozen.target)
    with SyncClient(name.target, certificates.channel_credentials()) as client:
        assert client.ping().pid == frozen.pid
        call = client.slow()
        name.to(other.target)
        frozen.stop()
        assert call.ended().code == "UNAVAILABLE"
        assert client.ping().pid == other.pid
        assert wait_until(lambda: client.state == "ALIVE")


def test_a_hanging_health_handler_is_a_dead_connection(start_server):
    """HTTP/2 pings are answered all the while: gRPC's own keepalive sees nothing."""
    server = start_server(health="hanging")
    with SyncClient(server.target) as client:
        assert client.ping().pid == server.pid
        ended = client.slow().ended()
        assert ended.code == "UNAVAILABLE"
        assert REASON in ended.details
        assert client.heartbeat.answered == 0


def test_calls_of_a_client_with_a_kit_go_on_after_the_replacement(shop, name, open_client):
    """A generated stub outlives the connection, and what is idempotent is retried on the next."""
    frozen, other = shop
    retry = RetryPolicy(retry_on="UNAVAILABLE", max_attempts=5, backoff=0.05)
    make = Kit if open_client.world == "sync" else aio.Kit
    kit = make(retry=retry, idempotent=True)
    client = open_client(name.target, around=kit.intercept_channel)
    stub = client.do(AuditStub, client.channel)

    def push() -> int:
        answer = client.do(stub.Push, Event(text="order"), timeout=WAIT_S, wait_for_ready=True)
        return answer.server_pid

    assert push() == frozen.pid
    name.to(other.target)
    frozen.stop()
    assert client.begin(PING, timeout=WAIT_S).ended().pid == other.pid
    assert client.bare.number >= 2
    assert push() == other.pid
