"""Handlers taken apart and put together again."""

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from scenarios.served import KINDS, ask, handler

from fixtures.small_servers import IN_TIME, serving
from rpcwheel._grpc.handlers import (
    behavior_of,
    is_pushing,
    kind_of,
    late_s,
    time_left,
    with_behavior,
)
from rpcwheel.rpc import Kind


class Context:
    def __init__(self, left):
        self.left = left

    def time_remaining(self):
        return self.left


class Watch:
    """A behavior that is an object; what grpc reads off it stands in its class, or in itself."""

    experimental_non_blocking = True

    def __init__(self):
        self.experimental_thread_pool = "a pool"

    def __call__(self, request, context):
        return request

    def method(self, request, context):
        return request

    method.experimental_non_blocking = True


def function(request, context):
    return request


function.experimental_non_blocking = True
function.mark = "mine"


def rewrapped(behavior):
    return behavior_of(
        with_behavior(handler("unary_stream", behavior), lambda request, context: request)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_keeps_its_kind_and_what_turns_bytes_into_messages(kind):
    original = handler(kind, function, request_deserializer=bytes.upper, response_serializer=bytes)
    assert behavior_of(original) is function

    def other(request, context):
        return request

    made = with_behavior(original, other)
    assert kind_of(made) is kind_of(original) is Kind[kind.upper()]
    assert behavior_of(made) is other
    assert made.request_deserializer == bytes.upper
    assert made.response_serializer is bytes


@pytest.mark.parametrize(
    "behavior",
    [function, Watch().method, Watch(), functools.partial(Watch())],
    ids=["function", "method", "object", "partial"],
)
def test_a_new_behavior_has_what_grpc_reads_off_the_old_one(behavior):
    made = rewrapped(behavior)
    assert is_pushing(made) == is_pushing(behavior)
    assert getattr(made, "experimental_thread_pool", None) == getattr(
        behavior, "experimental_thread_pool", None
    )


def test_a_new_behavior_has_the_name_and_the_attributes_of_the_old_one():
    made = rewrapped(function)
    assert made.__name__ == "function"
    assert made.mark == "mine"
    assert made.__wrapped__ is function


def test_a_handler_without_its_behavior_is_known_as_one():
    assert behavior_of(handler("unary_unary", None)) is None


@pytest.mark.parametrize(
    ("left", "told"), [(1.5, 1.5), (0, 0), (None, None), (9.2e18, None), (3e9, 3e9)]
)
def test_no_deadline_is_none_in_both_worlds(left, told):
    assert time_left(Context(left)) == told


def test_how_late_a_call_is_comes_from_grpcs_own_context():
    """Rests on `context._rpc_event`, grpcio 1.60 to 1.85."""
    seen = []

    def look(request, context):
        seen.append(late_s(context))
        while context.time_remaining():
            time.sleep(0.01)
        time.sleep(0.05)
        seen.append(late_s(context))
        return request

    with serving(handler("unary_unary", look)) as target:
        for timeout in IN_TIME:
            with pytest.raises(grpc.RpcError):
                ask(target, "unary_unary", timeout=timeout)
            if seen:
                break
    assert seen[0] == 0.0
    assert 0.04 < seen[1] < 20


def test_how_late_a_call_is_can_not_be_told_of_another_context():
    assert late_s(Context(0)) == 0.0


def test_a_pool_of_its_own_is_the_very_same_object():
    with ThreadPoolExecutor(1) as pool:

        def behavior(request, context):
            return request

        behavior.experimental_thread_pool = pool
        assert rewrapped(behavior).experimental_thread_pool is pool
