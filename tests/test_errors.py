"""The tree of exceptions."""

from __future__ import annotations

import pytest

from rpcwheel import errors


def test_every_exception_has_the_one_root() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.RpcWheelError)


def test_every_exception_stands_in_the_tree_of_the_docstring() -> None:
    assert errors.__doc__ is not None
    for name in errors.__all__:
        assert name in errors.__doc__


@pytest.mark.parametrize(
    ("error", "standard"),
    [(errors.ConfigurationError, ValueError), (errors.TimerStopped, RuntimeError)],
)
def test_code_that_knows_only_the_standard_errors_catches_ours(
    error: type[Exception], standard: type[Exception]
) -> None:
    with pytest.raises(standard):
        raise error("said why")
