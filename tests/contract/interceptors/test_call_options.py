"""`call_options`: other policies for the calls of a block."""

from fixtures.clients import held, ways
from rpcwheel import DefaultResponsePolicy, call_options

each_world = ways("sync blocking", "aio unary")


def test_a_timeout_holds_for_the_calls_of_the_block(shop, client):
    channel = client.open()
    with call_options(timeout=60.0):
        client.ask(channel)
        client.ask(channel, timeout=30.0)
    client.ask(channel)
    inside, shorter, outside = shop.calls
    assert 31 < inside.time_remaining <= 61
    assert shorter.time_remaining <= 31
    assert outside.time_remaining is None


@each_world
def test_an_inner_block_takes_what_it_does_not_set_from_the_outer_one(shop, client):
    channel = client.open()
    with call_options(timeout=60.0), call_options(retry=None):
        shop.then("UNAVAILABLE")
        client.refused(channel)
        assert shop.calls[0].time_remaining <= 61
    shop.then("UNAVAILABLE")
    assert client.ask(channel) == b"x"


@held
def test_a_call_follows_the_options_under_which_it_began(shop, client):
    shop.then("UNAVAILABLE")
    default = DefaultResponsePolicy(on="UNAVAILABLE", default=client.default(b"no"))
    channel = client.open()
    with call_options(default_response=default, retry=None):
        call = client.begin(channel)
    assert client.answer(call) == b"no"
    assert len(shop.calls) == 1
