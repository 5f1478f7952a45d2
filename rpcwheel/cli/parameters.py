"""Parameters that several commands have, and their checks."""

import inspect
import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from .doctor.tls import ROOTS_VARIABLE, TlsSettings

JOURNAL_PREFIXES: Final = ("sqlite:///", "postgresql://", "redis://", "rediss://")

JournalUrl = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="sqlite:///FILE, postgresql://HOST/DATABASE or redis://HOST:PORT.",
        autocompletion=lambda: list(JOURNAL_PREFIXES),
    ),
]

LONGEST_S: Final = 1e6
"""Eleven days, less than sockets and threads can wait for."""


def check_seconds(seconds: float | None) -> float | None:
    """Check an option in seconds.

    Raises:
        typer.BadParameter: The value is not above zero, or too large.
    """
    if seconds is not None and not 0 < seconds <= LONGEST_S:
        raise typer.BadParameter(f"give seconds above zero, and at most {LONGEST_S:,.0f}")
    return seconds


LONGEST_SPAN_S: Final = 36_500 * 86_400.0
"""A century. Engines of journals have 63 bits for milliseconds."""

UNITS_S: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def parse_span(text: str) -> float:
    """Return the seconds of a length of time such as `90`, `30s`, `15m`, `2h` or `7d`.

    Raises:
        typer.BadParameter: It is none, or more than a century.
    """
    match = _SPAN.fullmatch(text.strip())
    if match is None or match[2] not in UNITS_S:
        raise typer.BadParameter(f"give a length of time, such as 30s, 15m, 2h or 7d, not {text!r}")
    span_s = float(match[1]) * UNITS_S[match[2]]
    if span_s > LONGEST_SPAN_S:
        raise typer.BadParameter(f"give a length of time of at most 36500d, not {text!r}")
    return span_s


def check_server_name(name: str) -> str:
    """Check the name that a certificate must be valid for.

    Raises:
        typer.BadParameter: It is not valid.
    """
    try:
        name.encode("idna")
    except UnicodeError as error:
        raise typer.BadParameter(f"{name!r} is not a valid server name: {error}") from None
    if "\0" in name or name.startswith("."):
        raise typer.BadParameter(f"{name!r} is not a valid server name")
    return name


def tls_settings(
    tls: Annotated[
        bool, typer.Option("--tls", help="Use TLS. The options below imply it.")
    ] = False,
    ca: Annotated[Path | None, typer.Option(help="Trusted CA certificates (PEM).")] = None,
    cert: Annotated[Path | None, typer.Option(help="Client certificate for mTLS (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    servername: Annotated[
        str,
        typer.Option(
            callback=check_server_name,
            show_default="HOST",
            help="The name that certificates must be valid for.",
        ),
    ] = "",
) -> TlsSettings:
    """Return the settings that the options of a command describe. Reads the files.

    Raises:
        typer.BadParameter: They do not belong together, or a file cannot be used.
    """
    if (cert is None) != (key is None):
        raise typer.BadParameter("--cert and --key must be given together")
    enabled = tls or any((ca, cert, servername))
    settings = TlsSettings(enabled, ca, cert, key, servername)
    try:
        if enabled:
            settings.context()
    except (OSError, ValueError) as error:
        roots = ca or (f"${ROOTS_VARIABLE}" if os.environ.get(ROOTS_VARIABLE) else None)
        files = ", ".join(str(file) for file in (roots, cert, key) if file)
        raise typer.BadParameter(f"{files} cannot be used: {error}") from None
    return settings


def with_options(
    make: Callable[..., object], parameter: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a parameter of a command by the options of `make`, which returns its value."""
    options = inspect.signature(make).parameters

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        @wraps(run)
        def command(**values: Any) -> None:
            value = make(**{name: values.pop(name) for name in options})
            run(**values, **{parameter: value})

        signature = inspect.signature(run)
        parameters: list[inspect.Parameter] = []
        for own in signature.parameters.values():
            parameters += options.values() if own.name == parameter else [own]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate
