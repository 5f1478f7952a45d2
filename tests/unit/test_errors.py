"""The exceptions."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from functools import partial

import pytest

from rpcwheel import errors


def test_every_exception_derives_from_rpcwheel_error() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.RpcWheelError)


def test_every_exception_is_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    for name in errors.__all__:
        assert name in errors.__doc__


def test_exceptions_derive_from_standard_exceptions() -> None:
    for error, standard in [
        (errors.ConfigurationError, ValueError),
        (errors.TimerStopped, RuntimeError),
    ]:
        with pytest.raises(standard):
            raise error("said why")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (5e-05, "0.00005 s"),
        (0.25, "0.25 s"),
        (999.4, "999 s"),
        (999.5, "1,000 s"),
        (86_500, "86,500 s"),
    ],
)
def test_times_in_texts_have_no_exponent(seconds: float, text: str) -> None:
    assert errors.time_text(seconds) == text


def timed_out(**changed: object) -> errors.CallTimeout:
    given = {
        "side": "server", "timeout": 2.0, "elapsed": 2.001, "start": 10.0, "sent": 10.25,
        "name": "orders",
    }  # fmt: skip
    return errors.CallTimeout(7, **(given | changed))


def test_a_call_timeout_is_a_timeout_error_without_errno() -> None:
    error = timed_out()
    assert isinstance(error, TimeoutError)
    assert (error.errno, error.args) == (None, ())


def test_a_call_timeout_says_which_side_was_slow() -> None:
    for changed, why in [
        ({}, "server slow: sent after 0.250 s, unanswered for 1.751 s"),
        ({"side": "client", "sent": None}, "client slow: the request was never sent"),
        ({"side": "client", "sent": 12.0}, "client slow: the request was sent only after 2.000 s"),
    ]:
        error = timed_out(**changed)
        text = f"orders: call 7 timed out after 2.001 s (timeout 2 s); {why}"
        assert str(error) == text
        assert repr(error) == f"CallTimeout({text!r})"
    assert "(timeout 86,400 s)" in str(timed_out(timeout=86_400.0))


def test_a_call_timeout_can_be_pickled() -> None:
    error = timed_out()
    error.add_note("at the till")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.CallTimeout
    assert vars(copy) == vars(error)


def test_a_value_in_a_message_is_cut_and_has_no_secrets_of_urls() -> None:
    for value, shown in [
        ("redis://:SEC@RET SECRET@10.0.0.7/0", "'redis://***@10.0.0.7/0'"),
        ("postgresql://shop?password=SECRET", "'postgresql://shop'"),
        (["redis://:SEC@RET SECRET@10.0.0.7/0"], "['redis://***@10.0.0.7/0']"),
        (["postgresql://shop?password=SECRET"], "['postgresql://shop..."),
        (["redis://a:SECRET@h", "redis://b:SECRET@h"], "['redis://***@h']"),
        ([f"redis://:{'SECRET' * 1000}@h"], "['redis://***@h']"),
        (["a@b", "c?"], "['a@b', 'c?']"),
        ("x" * 201, f"'{'x' * 199}..."),
    ]:
        assert errors.short_repr(value) == shown


def test_a_value_whose_repr_raises_is_shown_as_its_type() -> None:
    class Detached:
        def __repr__(self) -> str:
            raise LookupError

    assert errors.short_repr(Detached()) == "<Detached>"


def test_a_class_whose_objects_are_coroutine_functions_is_none() -> None:
    class Later:
        async def __call__(self) -> None: ...

    assert errors.is_coroutine_function(Later())
    assert not errors.is_coroutine_function(Later)


async def items(*_: object) -> AsyncIterator[None]:
    yield


class AsyncItems:
    __call__ = items


class AsyncFunction:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "function",
    [items, partial(items), AsyncItems(), partial(AsyncItems()), partial(AsyncFunction())],
)
def test_a_partial_or_an_async_generator_function_is_no_callback(function: object) -> None:
    with pytest.raises(TypeError, match="must be a plain function"):
        errors.check_callback(function, "callback", "callback()")
