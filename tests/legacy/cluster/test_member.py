"""What is known of one member, and what follows from a call that has failed on it."""

import itertools

import pytest

from rpcwheel.cluster.member import (
    MemberCore,
    Verdict,
    address_dialled,
    judged,
    proves_unsent,
)
from rpcwheel.instance import ServiceInstance

ORDERS = ServiceInstance(service="shop.Orders", host="10.0.0.7", port=50051)


@pytest.fixture
def member():
    return MemberCore(ORDERS, 0)


def test_a_member_is_idle_until_it_is_called_then_up(member):
    assert member.state == "IDLE"
    member.used = True
    assert member.state == "UP"


def test_what_is_down_is_down_whether_it_was_called_or_not(member):
    member.down_ns = 5
    assert member.state == "DOWN"


def test_who_wants_no_new_calls_drains_even_if_it_is_down(member):
    member.down_ns = 5
    member.instance = ORDERS.changed(status="DRAINING")
    assert member.state == "DRAINING"


def test_who_is_gone_drains_until_it_is_closed(member):
    member.leaving = True
    assert member.state == "DRAINING"
    member.closed = True
    assert member.state == "CLOSED"


def test_a_member_says_who_it_is(member):
    assert repr(member) == "<MemberCore 10.0.0.7:50051 of 'shop.Orders', IDLE>"
    assert (member.id, member.address, member.calls) == ("10.0.0.7:50051", "10.0.0.7:50051", 0)


STATES = ["READY", "IDLE", "CONNECTING", "TRANSIENT_FAILURE", "SHUTDOWN", ""]


def test_what_a_failure_tells_of_the_member_and_the_call():
    for state in STATES:
        # It found no connection: it goes to another member.
        assert judged("UNAVAILABLE", state, cut_off=True) == Verdict(is_down=True, may_move=True)
        # It may have been sent: it is the caller's.
        verdict = judged("UNAVAILABLE", state, cut_off=False)
        assert not verdict.may_move
        assert verdict.is_down is (state not in {"READY", ""})  # a server says UNAVAILABLE too
        # It waited in vain for a connection: there is none.
        verdict = judged("DEADLINE_EXCEEDED", state, cut_off=False)
        is_down = state in {"CONNECTING", "TRANSIENT_FAILURE"}
        assert verdict == Verdict(is_down=is_down, may_move=False)
    nothing = Verdict(is_down=False, may_move=False)
    for code in ("INTERNAL", "CANCELLED", "UNKNOWN", "NOT_FOUND", "UNIMPLEMENTED"):
        assert judged(code, "TRANSIENT_FAILURE", cut_off=True) == nothing


def late(member, began_s, now_s, heard_s=None, connection="CONNECTING"):
    """Whether a call whose time was over tells that it is down."""
    began_ns, now_ns = int(began_s * 10**9), int(now_s * 10**9)
    read_ns = None if heard_s is None else heard_s * 10**9
    return member.judged(
        "DEADLINE_EXCEEDED",
        connection,
        cut_off=False,
        began_ns=began_ns,
        read_ns=read_ns,
        now_ns=now_ns,
    ).is_down


def test_calls_of_little_time_prove_it_once_they_have_found_no_connection_for_a_while(member):
    assert late(member, 0, 2)
    assert not late(member, 5, 5, heard_s=4)  # it was heard meanwhile
    assert not late(member, 5, 5.999, heard_s=4)
    assert late(member, 5.999, 6, heard_s=4)
    assert not late(member, 7, 7, heard_s=6)


def test_a_connection_that_was_tried_in_vain_needs_no_more_time(member):
    assert late(member, 5, 5, connection="TRANSIENT_FAILURE")
    assert not late(member, 5, 5, connection="READY")


def test_the_address_that_a_failure_names_is_known_where_the_host_is_one():
    said = {
        "127.0.0.1": "ipv4:127.0.0.1:7: ",
        "::1": "ipv6:%5B::1%5D:7: ",
        "0:0:0:0:0:0:0:1": "ipv6:%5B::1%5D:7: ",
        "fe80::1%eth0": None,
        "orders.example": None,
    }
    for host, address in said.items():
        instance = ServiceInstance(service="shop.Orders", host=host, port=7)
        assert address_dialled(instance) == address


def test_two_of_three_signs_prove_that_nothing_was_sent():
    own = ServiceInstance(service="shop.Orders", host="10.0.0.7", port=1)
    for had_none, has_none, named in itertools.product((True, False), repeat=3):
        details = f"last error: ipv4:10.0.0.{7 if named else 8}:1: Connection refused"
        sure = proves_unsent(own, details, had_none=had_none, has_none=has_none)
        assert sure is ([had_none, has_none, named].count(True) >= 2)


def test_what_a_host_name_stands_for_proves_nothing():
    own = ServiceInstance(service="shop.Orders", host="orders", port=1)
    assert not proves_unsent(own, "ipv4:10.0.0.7:1: refused", had_none=True, has_none=False)
    assert proves_unsent(own, "ipv4:10.0.0.7:1: refused", had_none=True, has_none=True)
