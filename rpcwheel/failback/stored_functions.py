"""The arguments of functions as JSON, for calls that are stored in a journal.

Each parameter is written and read by pydantic as its annotation says, so models, dataclasses,
dates and decimals come back as they were. Protobuf messages are written as bytes. A parameter
without an annotation takes what JSON has: what comes back is a list where a tuple was, and a number
or a text where a member of an `IntEnum` or `StrEnum` was.

A call is stored only if its arguments are read back as equal ones. So no call is answered with
"queued" that could not be made later, or that would be made with other arguments.
"""

from __future__ import annotations

import difflib
import inspect
import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from rpcwheel.call.idempotency import checked_order_key
from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import readable

from .stored import StoredFunction

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.journal.backend import StoredCall

    from .stored import StoredRpc

_CONFIG: Any = {
    "ser_json_bytes": "base64",
    "val_json_bytes": "base64",
    "ser_json_inf_nan": "constants",
    "arbitrary_types_allowed": True,
}


class FunctionCodec:
    """Writes and reads the arguments of one function."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Look at the signature of a function, whose calls are stored under the name.

        Raises:
            ConfigurationError: It is a method, or the type of a parameter cannot be written as
                JSON.
        """
        self.function = function
        self.name = name
        try:
            self._signature = inspect.signature(function, eval_str=True)
        except Exception as error:
            raise ConfigurationError(
                f"{self.name}: its annotations cannot be resolved ({error}), so its arguments "
                "cannot be stored in a journal"
            ) from error
        hints = {
            parameter.name: parameter.annotation
            for parameter in self._signature.parameters.values()
            if parameter.annotation is not parameter.empty
        }
        first = next(iter(self._signature.parameters), "")
        if first in {"self", "cls"} - hints.keys() or _is_bound(function):
            raise ConfigurationError(
                f"{self.name} is a method, whose object cannot be stored in a journal: decorate a "
                "function that makes or finds the object"
            )
        self._adapters: dict[str, TypeAdapter[Any]] = {}
        for argument, parameter in self._signature.parameters.items():
            hint: Any = hints.get(argument, Any)
            if parameter.kind is parameter.VAR_POSITIONAL:
                hint = tuple.__class_getitem__((hint, ...))
            elif parameter.kind is parameter.VAR_KEYWORD:
                hint = dict.__class_getitem__((str, hint))
            self._adapters[argument] = self._adapter(argument, hint)

    def _adapter(self, name: str, hint: Any) -> TypeAdapter[Any]:
        if hasattr(hint, "SerializeToString") and hasattr(hint, "FromString"):
            hint = Annotated[
                Any,
                PlainSerializer(lambda message: message.SerializeToString().hex(), return_type=str),
                PlainValidator(lambda text, kind=hint: kind.FromString(bytes.fromhex(text))),
            ]
        try:
            adapter = TypeAdapter(hint, config=_CONFIG)
            adapter.json_schema(mode="serialization")
        except PydanticUserError:
            try:  # models have a configuration of their own
                adapter = TypeAdapter(hint)
                adapter.json_schema(mode="serialization")
            except PydanticUserError as error:
                raise ConfigurationError(
                    f"{self.name}: the argument {name!r} ({hint!r}) cannot be stored in a journal; "
                    "use a type that pydantic can write as JSON"
                ) from error
        return adapter

    def check_order_key(self, chosen: object) -> None:
        """Check that an order key that is a name is that of an argument.

        Raises:
            ConfigurationError: It is not; the message names the nearest.
        """
        parameters = self._signature.parameters
        if not isinstance(chosen, str):
            return
        if chosen not in parameters:
            near = difflib.get_close_matches(chosen, parameters, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(parameters)}"
            problem = f"there is no argument {chosen!r}; {meant}"
        elif parameters[chosen].kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            problem = f"{chosen!r} is several arguments; give a function"
        else:
            return
        raise ConfigurationError(
            f"{self.name}: order_key must be the name of an argument, or a function, and {problem}"
        )

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StoredFunction:
        """Return the stored form of a call.

        Raises:
            ValueError: An argument cannot be written and read; the message names it, without its
                value.
        """
        bound = self._signature.bind(*args, **kwargs)
        written: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            adapter = self._adapters[name]
            try:
                text = adapter.dump_json(value, by_alias=True, round_trip=True, warnings=False)
                is_equal = bool(_with_lists(adapter.validate_json(text)) == _with_lists(value))
                written[name] = json.loads(text)
            except Exception as error:
                raise ValueError(
                    f"the argument {name!r} cannot be stored in the journal: {_why(error)}"
                ) from error
            if not is_equal:
                raise ValueError(
                    f"the argument {name!r} cannot be stored in the journal: as JSON it is another "
                    "value; annotate the parameter with the argument's type"
                )
        return StoredFunction(json.dumps(written).encode())

    def make(
        self, call: StoredCall, body: StoredRpc | StoredFunction
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function and the arguments of a stored call.

        Raises:
            ValueError: They do not fit the function any more.
        """
        if not isinstance(body, StoredFunction):
            raise ValueError("it is a gRPC call, and its queue is one of a function")  # noqa: TRY004
        if call.method != self.name:
            raise ValueError(f"its function is {call.method}, and the queue is of {self.name}")
        try:
            bound = inspect.BoundArguments(self._signature, self._read(json.loads(body.arguments)))
            self._signature.bind(*bound.args, **bound.kwargs)
        except Exception as error:
            raise ValueError(
                f"its arguments do not fit {self.name}{self._signature}: {_why(error)}"
            ) from error
        return self.function, bound.args, bound.kwargs

    def _read(self, written: Any) -> Any:
        read = {}
        for name, value in written.items():
            if name not in self._adapters:
                raise ValueError(f"there is no argument {name!r}")
            read[name] = self._adapters[name].validate_json(json.dumps(value))
        return read

    def order_key(
        self, chosen: str | Callable[..., str | None] | None, args: Any, kwargs: Any
    ) -> str | None:
        """Return the order key of a call: an argument, or the result of the user's function.

        Raises:
            Exception: Of the user's function.
        """
        if chosen is None:
            return None
        if callable(chosen):
            return checked_order_key(chosen(*args, **kwargs))
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return checked_order_key(bound.arguments.get(chosen))


def _is_bound(function: Callable[..., Any]) -> bool:
    """Whether a function is a method of an object that is neither a class nor a module."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)  # of a function that is written in C: its module
    return not (owner is None or inspect.isclass(owner) or inspect.ismodule(owner))


def _with_lists(value: Any) -> Any:
    """Replace tuples by lists, which JSON has in their place."""
    if isinstance(value, (list, tuple)):
        return [_with_lists(element) for element in value]
    if type(value) is dict:
        return {key: _with_lists(element) for key, element in value.items()}
    return value


def _why(error: Exception) -> str:
    """Describe an error without the values of arguments, which may be secret."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    described = (
        (".".join(map(str, details["loc"])), readable(details["msg"])) for details in problems
    )
    return "; ".join(f"{place} {problem}".strip() for place, problem in described)
