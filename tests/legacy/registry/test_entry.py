"""The states of a registration."""

from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.entry import TRANSITIONS, Entry, State


def test_each_state_has_its_transitions_and_is_its_own_word():
    assert set(TRANSITIONS) == set(State)
    assert [str(state) for state in State] == [
        "PENDING",
        "PUBLISHED",
        "LOST",
        "WITHDRAWING",
        "GONE",
    ]


def test_nothing_follows_the_end_and_the_end_can_be_reached_from_everywhere():
    assert TRANSITIONS[State.GONE] == set()
    reached = {State.GONE}
    for _ in State:
        reached |= {state for state, after in TRANSITIONS.items() if after & reached}
    assert reached == set(State)


def test_an_entry_begins_wanted_and_unknown():
    entry = Entry(ServiceInstance(service="shop", host="a", port=1))
    assert (entry.wanted, entry.state, entry.generation) == (True, State.PENDING, 1)
    assert (entry.sent, entry.doubt_ns, entry.error) == ({}, 0, None)
