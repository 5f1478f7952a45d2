"""What is kept of a queued call, and its name in events and logs."""

import functools
import math

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue, StringValue

from rpcwheel.durations import NEVER
from rpcwheel.failback.queued_call import QueuedCall, SavedCall, label_of

GONE = OSError("gone")


def push(*args, **kwargs):
    return args, kwargs


def saved(*args, **kwargs):
    return SavedCall.save(push, args, kwargs)


def queued(*args, **settings):
    settings = {"next_attempt_ns": 9_000_000_000} | settings
    return QueuedCall(saved(*args), GONE, started_ns=1_000_000_000, start=print, **settings)


def test_each_attempt_gets_a_copy_of_a_message():
    message = BytesValue(value=b"x")
    call = saved(message)
    message.value = b"changed"
    first, second = call.args[0], call.args[0]
    assert type(first) is BytesValue
    assert first == second == BytesValue(value=b"x")
    assert first is not second


def test_arguments_that_are_not_messages_are_kept_as_they_are():
    items, other = [StringValue(value="in a list")], object()
    assert saved(other, items, StringValue).args == (other, items, StringValue)
    assert saved(items).args[0] is items


async def some():
    yield 1


@pytest.mark.parametrize("used_up", [iter([1]), (n for n in [1]), some()])
def test_a_call_with_an_iterator_cannot_be_made_again(used_up):
    obstacle = saved("x", items=used_up).obstacle
    assert obstacle.startswith(f"argument 'items' is an iterator ({type(used_up).__name__})")
    assert "give a list" in obstacle
    assert saved(used_up).obstacle.startswith("argument 0 is an iterator")


def test_a_call_with_a_message_that_cannot_be_serialized_cannot_be_made_again():
    class Broken:
        def SerializeToString(self):  # noqa: N802
            raise ValueError("too large")

        @classmethod
        def FromString(cls, data):  # noqa: N802
            raise AssertionError

    assert saved(Broken()).obstacle == "an argument cannot be serialized: too large"


def test_a_failed_call_has_all_that_is_needed_to_make_it_by_other_means():
    failed = queued(StringValue(value="order"), attempts=4).failed_call(3_500_000_000, "no reason")
    assert failed.function == f"{__name__}.push"
    assert (failed.args, failed.kwargs) == ((StringValue(value="order"),), {})
    assert (failed.attempts, failed.waited_s) == (4, 2.5)
    assert (failed.error, failed.reason) == (GONE, "no reason")


def test_no_repr_contains_arguments():
    call = queued("secret")
    for shown in (call, call.saved, call.entry(0), call.failed_call(0, "x")):
        assert "secret" not in repr(shown)


def test_an_overdue_attempt_is_due_in_0_s_and_one_that_never_comes_in_infinite_time():
    assert queued().entry(20_000_000_000).next_attempt_s == 0.0
    assert queued(next_attempt_ns=5 + NEVER).entry(0).next_attempt_s == math.inf


class Shop:
    def push(self):
        """A method."""

    def __call__(self):
        """Callable itself."""


@pytest.mark.parametrize(
    ("function", "label"),
    [
        (push, f"{__name__}.push"),
        (Shop.push, f"{__name__}.Shop.push"),
        (Shop().push, f"{__name__}.Shop.push"),
        (Shop(), f"{__name__}.Shop"),
        (functools.partial(functools.partial(push, 1), 2), f"{__name__}.push"),
        (len, "builtins.len"),
    ],
)
def test_a_function_is_named_by_its_module_and_qualified_name(function, label):
    assert label_of(function) == label


@pytest.mark.parametrize(
    ("label", "shown"), [("/shop.Orders/Push", "/shop.Orders/Push"), (5, f"{__name__}.Labeled")]
)
def test_an_object_with_a_label_is_named_by_it_if_it_is_a_string(label, shown):
    class Labeled(Shop):
        __qualname__ = "Labeled"

    function = Labeled()
    function.label = label
    assert label_of(function) == label_of(functools.partial(function, 1)) == shown


class Passes(grpc.UnaryUnaryClientInterceptor):
    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)


async def test_a_member_of_a_stub_is_named_by_its_method():
    with grpc.insecure_channel("localhost:1") as channel:
        member = channel.unary_unary("/shop.Orders/Push")
        intercepted = grpc.intercept_channel(channel, Passes()).unary_unary("/shop.Orders/Push")
        for function in (member, member.future, intercepted):
            assert label_of(function) == "/shop.Orders/Push"
    async with grpc.aio.insecure_channel("localhost:1") as channel:
        assert label_of(channel.unary_unary("/shop.Orders/Push")) == "/shop.Orders/Push"
