"""What a broadcast raises that not all members have answered and how it names them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["BroadcastFailed", "told_apart"]


class BroadcastFailed(grpc.RpcError):
    """A broadcast that some members have not answered, or none of them; the others did their work.

    Its code and metadata are those of the first error, by the order of the keys of `errors`.
    """

    def __init__(
        self, method: str, answers: Mapping[str, Any], errors: Mapping[str, grpc.RpcError]
    ) -> None:
        """Keep what came of it.

        Args:
            method: In full.
            answers: The answers, by member: its address, or the target of its channel.
            errors: The errors, by member; one at least.
        """
        grpc.RpcError.__init__(self)
        self.method = method
        self.answers = dict(answers)
        """By member, with the keys that `BroadcastInvoker` uses."""
        self.errors = dict(errors)
        """By member, with the same keys."""
        self._first: Any = self.errors[min(self.errors)]

    def code(self) -> grpc.StatusCode:
        """The status code of the first error."""
        code: grpc.StatusCode = self._first.code()
        return code

    def details(self) -> str:
        """How many failed, and each of them."""
        return str(self)

    def initial_metadata(self) -> Any:
        """Of the first error."""
        return self._first.initial_metadata()

    def trailing_metadata(self) -> Any:
        """Of the first error."""
        return self._first.trailing_metadata()

    def __str__(self) -> str:
        told = "; ".join(
            f"{member}: {_said(self.errors[member])}" for member in sorted(self.errors)
        )
        count = len(self.errors) + len(self.answers)
        return f"{self.method}: {len(self.errors)} of {count} members failed: {told}"

    def __repr__(self) -> str:
        return f"BroadcastFailed({str(self)!r})"


def _said(error: Any) -> str:
    code = error.code()
    return f"{code.name} {error.details()}" if code is not None else str(error)


def told_apart(names: Iterable[str]) -> list[str]:
    """Give them in their order; the second of one name is `"name #2"`, and so on."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = number = seen.get(name, 0) + 1
        found.append(name if number == 1 else f"{name} #{number}")
    return found
