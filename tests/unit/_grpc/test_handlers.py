"""A handler whose behavior is replaced keeps everything that gRPC reads from it."""

import functools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from scenarios.served import KINDS, handler

from rpcwheel._grpc.handlers import (
    behavior_of,
    is_pushing,
    kind_of,
    late_s,
    time_left,
    with_behavior,
)
from rpcwheel.rpc import Kind


class Watch:
    """A behavior that is an object; gRPC reads one attribute from its class, one from itself."""

    experimental_non_blocking = True

    def __init__(self, pool=None):
        self.experimental_thread_pool = pool

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
def test_a_handler_keeps_its_kind_and_serializers(kind):
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
def test_a_new_behavior_pushes_its_responses_if_the_old_one_did(behavior):
    assert is_pushing(rewrapped(behavior)) == is_pushing(behavior)


def test_a_new_behavior_has_the_thread_pool_of_the_old_one():
    with ThreadPoolExecutor(1) as pool:
        assert rewrapped(Watch(pool)).experimental_thread_pool is pool


def test_a_new_behavior_has_the_name_and_the_attributes_of_the_old_one():
    made = rewrapped(function)
    assert made.__name__ == "function"
    assert made.mark == "mine"
    assert made.__wrapped__ is function


def test_a_handler_may_have_no_behavior():
    assert behavior_of(handler("unary_unary", None)) is None


@pytest.mark.parametrize(
    ("left", "expected"), [(1.5, 1.5), (0, 0), (None, None), (9.2e18, None), (3e9, 3e9)]
)
def test_a_call_without_deadline_has_no_time_left_in_both_worlds(left, expected):
    assert time_left(SimpleNamespace(time_remaining=lambda: left)) == expected


def test_the_delay_since_the_deadline_is_zero_for_contexts_without_it():
    assert late_s(SimpleNamespace()) == 0.0
