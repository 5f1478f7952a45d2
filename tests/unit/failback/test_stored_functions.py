"""Arguments of functions as JSON."""

import datetime as dt
import functools
import json
import uuid
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from pydantic import BaseModel, Field, SecretStr

from rpcwheel.failback.stored import StoredFunction, StoredRpc
from rpcwheel.failback.stored_functions import FunctionCodec
from rpcwheel.journal.backend import CallState, StoredCall
from rpcwheel.rpc import Kind


class Color(Enum):
    RED = "red"


class Order(BaseModel):
    order_id: int = Field(alias="orderId")
    note: str = ""


class Special(Order):
    extra: int = 0


class Secret(BaseModel):
    token: SecretStr


@dataclass
class Line:
    shop: str
    count: int = 1


class Shop:
    def push(self, order: str) -> str:
        return order

    @classmethod
    def pull(cls, order: str) -> str:
        return order


def call_of(method="push"):
    return StoredCall(1, "q", "", method, "key", b"", 0, 0, 9, 1, "", None, CallState.TAKEN)


def made(function, *args, **kwargs):
    """What the function returns if it is called with the arguments that were stored."""
    codec = FunctionCodec(function, "push")
    function, read_args, read_kwargs = codec.make(call_of(), codec.encode(args, kwargs))
    return function(*read_args, **read_kwargs)


def test_a_class_method_and_a_function_that_wraps_a_method_can_be_stored():
    wrapper = functools.wraps(Shop().push)(lambda order: Shop().push(order))
    assert made(Shop.pull, "order") == made(wrapper, "order") == "order"


def identity_of(kind):
    def function(argument):
        return argument

    function.__annotations__ = {"argument": kind}
    return function


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Order, Order(orderId=5, note="x")),
        (list[Order], [Order(orderId=5)]),
        (Order | None, None),
        (Line, Line("a", 2)),
        (dt.datetime, dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC)),
        (dt.timedelta, dt.timedelta(seconds=1.5)),
        (Decimal, Decimal("1.10")),
        (uuid.UUID, uuid.UUID(int=5)),
        (Color, Color.RED),
        (set[int], {1, 2}),
        (tuple[int, str], (1, "x")),
        (dict[str, bytes], {"k": b"\xfb\xff\x00"}),
        (float, float("inf")),
        (Duration, Duration(seconds=5)),
        (Any, {"a": [1, None, "x", 1.5, True]}),
    ],
)
def test_an_argument_comes_back_as_it_was(kind, value):
    read = made(identity_of(kind), value)
    assert (read, type(read)) == (value, type(value))


def test_an_argument_without_annotation_comes_back_with_lists_for_tuples():
    given = (
        1,
        {"a": (2,), "": [None, True, -(2**53), 5e-324, float("-inf"), "\0\u2028\U0001f600"]},
    )
    read = made(lambda argument: argument, given)
    assert read == [1, {"a": [2], "": given[1][""]}]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Any, b"bytes"),
        (Any, dt.datetime(2026, 1, 1)),  # noqa: DTZ001 - any time
        (Any, Order(orderId=5)),
        (Any, {1: "a"}),
        (Any, {"x"}),
        (Any, object()),
        (Any, Duration(seconds=5)),
        (str, 5),
        (int, "5"),
        (Order, Special(orderId=5, extra=6)),
        (Secret, Secret(token="x")),
        (float, float("nan")),
        (str, "\udcff"),
    ],
)
def test_an_argument_that_would_not_come_back_is_refused_by_its_name(kind, value):
    with pytest.raises(ValueError, match="the argument 'argument' cannot be stored in the journal"):
        FunctionCodec(identity_of(kind), "push").encode((value,), {})


def test_an_error_does_not_contain_the_value():
    with pytest.raises(ValueError, match="it must be a valid string") as caught:
        FunctionCodec(identity_of(str), "push").encode((4711,), {})
    assert "4711" not in str(caught.value)


def test_an_equality_of_the_user_that_raises_refuses_the_argument():
    class Odd(BaseModel):
        def __eq__(self, other):
            raise RuntimeError("ambiguous")

        __hash__ = None

    with pytest.raises(ValueError, match="cannot be stored in the journal: ambiguous"):
        FunctionCodec(identity_of(Odd), "push").encode((Odd(),), {})


def test_all_kinds_of_parameters_come_back():
    def push(first, /, second=2, *rest: Decimal, third=3, **others: dt.date):
        return first, second, rest, third, others

    day = dt.date(2026, 1, 2)
    assert made(push, 1) == (1, 2, (), 3, {})
    assert made(push, 1, third=4) == (1, 2, (), 4, {})
    assert made(push, 1, 5, Decimal("0.1"), third=4, day=day) == (
        1,
        5,
        (Decimal("0.1"),),
        4,
        {"day": day},
    )


class Pusher:
    def __call__(self, order: Order, day: "dt.date"):
        return order, day


@pytest.mark.parametrize("function", [Pusher(), functools.partial(Pusher.__call__, None)])
def test_callable_objects_and_partial_functions_have_types_too(function):
    given = Order(orderId=5), dt.date(2026, 1, 2)
    assert made(function, *given) == given


def test_a_default_is_that_of_the_function_when_the_call_is_made():
    codec = FunctionCodec(lambda first, second=2: (first, second), "push")
    stored = codec.encode((1,), {})
    assert json.loads(stored.arguments) == {"first": 1}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: None, "there is no argument 'order'"),
        (lambda order, shop: None, "missing a required argument: 'shop'"),
        (identity_of(int), "there is no argument 'order'"),
    ],
)
def test_a_function_with_other_parameters_refuses_the_stored_call(function, message):
    stored = FunctionCodec(lambda order: None, "push").encode(("x",), {})
    with pytest.raises(ValueError, match=rf"its arguments do not fit push\(.*\): {message}"):
        FunctionCodec(function, "push").make(call_of(), stored)


def test_a_function_with_another_type_refuses_the_stored_call_without_its_value():
    stored = FunctionCodec(identity_of(str), "push").encode(("secret",), {})
    with pytest.raises(ValueError, match=r"do not fit .*it must be a valid integer") as caught:
        FunctionCodec(identity_of(int), "push").make(call_of(), stored)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("arguments", [b"", b"[]", b"5", b"{", b'"x"', b"\xff"])
def test_damaged_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="its arguments do not fit push"):
        FunctionCodec(identity_of(int), "push").make(call_of(), StoredFunction(arguments))


def test_a_call_of_another_function_or_of_grpc_is_refused():
    codec = FunctionCodec(identity_of(int), "push")
    with pytest.raises(ValueError, match="its function is pull, and the queue is of push"):
        codec.make(call_of("pull"), StoredFunction(b"{}"))
    with pytest.raises(ValueError, match="it is a gRPC call"):
        codec.make(call_of(), StoredRpc(Kind.UNARY_UNARY, (b"",)))


# --- The order key ---


def test_the_order_key_is_an_argument_or_of_a_function_of_the_arguments():
    codec = FunctionCodec(lambda order, shop="none": None, "push")
    assert codec.order_key(None, (1,), {}) is None
    assert codec.order_key("shop", (1,), {"shop": "a"}) == "a"
    assert codec.order_key("shop", (1, "b"), {}) == "b"
    assert codec.order_key("shop", (1,), {}) == "none"
    assert codec.order_key("order", (1,), {}) == "1"
    assert codec.order_key(lambda order, shop: shop + "!", (1,), {"shop": "a"}) == "a!"
    with pytest.raises(TypeError, match="order_key must give a str"):
        codec.order_key("order", (1.5,), {})
