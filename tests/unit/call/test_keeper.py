"""How long the connections of a kit's closed channel are kept."""

from rpcwheel.call.keeper import ChannelKeeper


def test_the_connections_are_closed_once_when_the_last_call_has_left_its_queue():
    keeper, closed = ChannelKeeper(is_used=False), []
    assert [keeper.add(), keeper.add()] == [True, True]
    keeper.remove()
    assert keeper.keep(lambda: closed.append(1))
    assert keeper.add()  # a call in flight has failed
    keeper.remove()
    assert closed == []
    keeper.remove()
    assert closed == [1]
    assert not keeper.keep(lambda: closed.append(2))


def test_no_call_is_queued_when_the_connections_are_closed():
    keeper = ChannelKeeper(is_used=False)
    assert not keeper.keep(lambda: None)
    assert not keeper.add()
    keeper = ChannelKeeper(is_used=False)
    keeper.add()
    keeper.end()
    assert not keeper.add()
    keeper.remove()
