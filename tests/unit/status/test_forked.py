"""What a forked child reports."""

from rpcwheel.live import _Live


class Component:
    """Anything."""


def test_a_forked_child_reports_only_its_timers_and_queues():
    live, made = _Live(), {}
    for name in ("timer", "failback", "channel", "heartbeat", "detector", "registry", "publisher"):
        made[name] = Component()
        live.add(name, made[name])
    live.reset()
    assert [name for name in made if live.components(name)] == ["timer", "failback"]
    assert live.components("timer") == [made["timer"]]
