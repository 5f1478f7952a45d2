"""What a forked child reports."""

from rpcwheel.telemetry.components import _Components


class Component:
    """Anything."""


def test_a_forked_child_reports_only_its_timers_and_queues():
    components, made = _Components(), {}
    for name in ("timer", "failback", "channel", "heartbeat", "detector", "registry", "publisher"):
        made[name] = Component()
        components.add(name, made[name])
    components.reset()
    assert [name for name in made if components.of_kind(name)] == ["timer", "failback"]
    assert components.of_kind("timer") == [made["timer"]]
