"""What happens between the steps of the start of a publisher."""

from fixtures.shops import SERVICE
from fixtures.waiting import WAIT_S


def test_a_stop_before_the_server_has_started_ends_it_too(
    world, make_world_shop, memory, monkeypatch
):
    """Otherwise a program that gets a signal then would wait for its end forever."""
    shop = make_world_shop()
    published = world.api.Publisher(shop.server, memory, SERVICE, port=0, lame_duck=0.05)
    begin_start = published._begin_start

    def begin_and_stop():
        begun = begin_start()
        published.begin_stop()
        return begun

    monkeypatch.setattr(published, "_begin_start", begin_and_stop)
    world.do(published.start)
    assert world.do(published.wait, WAIT_S)
    assert published.registrations == ()
    assert world.do(shop.server.wait_for_termination, WAIT_S) is False
