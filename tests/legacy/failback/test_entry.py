"""One parked call: what is kept of it, and that each try gets it fresh."""

import functools
from contextvars import ContextVar

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue, StringValue

from rpcwheel.failback.entry import Call, Entry, label_of

COLOUR = ContextVar("COLOUR", default="none")


def keep(*args, **kwargs):
    return args, kwargs


def at_rest(*args, **kwargs):
    return Call.at_rest(keep, args, kwargs)


def test_a_call_at_rest_can_be_made():
    assert at_rest(1, [2], three=3)() == ((1, [2]), {"three": 3})


def test_each_try_gets_a_message_of_the_same_class():
    assert type(at_rest(BytesValue(value=b"x")).args[0]) is BytesValue


def test_other_arguments_are_passed_on_as_they_are():
    items, self = [StringValue(value="in a list")], object()
    assert at_rest(self, items).args[0] is self
    assert at_rest(self, items).args[1] is items


def test_a_message_class_is_no_message():
    assert at_rest(StringValue).args == (StringValue,)


def test_a_call_keeps_its_callers_context_and_each_try_a_copy_of_it():
    token = COLOUR.set("red")
    call = at_rest()
    COLOUR.reset(token)
    for _ in range(2):
        context = call.fresh_context()
        assert context.run(COLOUR.get) == "red"
        context.run(COLOUR.set, "spoilt")


async def some():
    yield 1


@pytest.mark.parametrize("used_up", [iter([1]), (n for n in [1]), some()])
def test_a_call_with_an_iterator_cannot_be_made_twice_and_says_so(used_up):
    flaw = at_rest("x", items=used_up).flaw
    assert flaw.startswith(f"argument 'items' is an iterator ({type(used_up).__name__})")
    assert "give a list" in flaw
    assert at_rest(used_up).flaw.startswith("argument 0 is an iterator")


def test_a_call_with_a_message_that_does_not_serialize_says_so():
    class Broken:
        def SerializeToString(self):  # noqa: N802
            raise ValueError("too large")

        @classmethod
        def FromString(cls, data):  # noqa: N802
            raise AssertionError

    assert at_rest(Broken()).flaw == "an argument does not serialize: too large"


def test_a_call_without_fault_has_no_flaw():
    assert at_rest(1, [2], {3}, message=StringValue()).flaw is None


def test_a_given_up_call_tells_all_that_is_needed_to_make_it_by_other_means():
    error = OSError("gone")
    call = at_rest(StringValue(value="order"), urgent=True)
    entry = Entry(call, error, 1_000_000_000, 0, print, attempts=4)
    failed = entry.given_up(3_500_000_000, "no retries left")
    assert failed.function == "test_entry.keep" or failed.function.endswith(".keep")
    assert failed.args == (StringValue(value="order"),)
    assert failed.kwargs == {"urgent": True}
    assert (failed.attempts, failed.waited_s) == (4, 2.5)
    assert failed.error is error
    assert failed.reason == "no retries left"


class Shop:
    def push(self):
        """A method."""

    def __call__(self):
        """Callable itself."""


@pytest.mark.parametrize(
    ("function", "label"),
    [
        (keep, f"{__name__}.keep"),
        (Shop.push, f"{__name__}.Shop.push"),
        (Shop().push, f"{__name__}.Shop.push"),
        (Shop(), f"{__name__}.Shop"),
        (functools.partial(keep, 1), f"{__name__}.keep"),
        (functools.partial(functools.partial(keep, 1), 2), f"{__name__}.keep"),
        (len, "builtins.len"),
    ],
)
def test_a_function_is_labelled_by_its_module_and_name(function, label):
    assert label_of(function) == label


class Labelled:
    """As interceptors park them."""

    label = "/shop.Orders/Push"

    def __call__(self):
        """Callable itself."""


class OddlyLabelled(Labelled):
    label = 5


def test_what_has_a_label_names_itself():
    assert label_of(Labelled()) == "/shop.Orders/Push"
    assert label_of(functools.partial(Labelled(), 1)) == "/shop.Orders/Push"
    assert Entry(Call.at_rest(Labelled(), (), {}), OSError(), 0, 0, print).label == Labelled.label


def test_a_label_that_is_no_string_is_none():
    assert label_of(OddlyLabelled()) == f"{__name__}.OddlyLabelled"


async def test_a_stubs_member_is_labelled_by_the_method_it_calls():
    with grpc.insecure_channel("localhost:1") as channel:
        assert label_of(channel.unary_unary("/shop.Orders/Push")) == "/shop.Orders/Push"
        assert label_of(channel.unary_unary("/shop.Orders/Push").future) == "/shop.Orders/Push"
        intercepted = grpc.intercept_channel(channel, Nothing())
        assert label_of(intercepted.unary_unary("/shop.Orders/Push")) == "/shop.Orders/Push"
    async with grpc.aio.insecure_channel("localhost:1") as channel:
        assert label_of(channel.unary_unary("/shop.Orders/Push")) == "/shop.Orders/Push"


class Nothing(grpc.UnaryUnaryClientInterceptor):
    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)
