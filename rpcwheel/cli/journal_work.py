"""`rpcwheel journal work URL`: delivers the calls of a journal until it is stopped."""

import base64
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import grpc
import typer

from rpcwheel._grpc.calls import checked_metadata
from rpcwheel.errors import ConfigurationError
from rpcwheel.events.log import report_suppressed
from rpcwheel.failback import FailbackStats, JournalWorker
from rpcwheel.failback.invoker import registered_functions
from rpcwheel.resolver import insecure_channel, secure_channel

from .doctor.tls import TlsSettings
from .findings import printable
from .parameters import JournalUrl, check_seconds, tls_settings, with_options

LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(message)s"

SIGNAL_CHECK_INTERVAL_S: Final = 0.2
"""How often the main thread checks for signals, and for calls that are skipped."""

PROGRESS_INTERVAL_S: Final = 10.0
"""How often the counts are printed if they have changed."""


@with_options(tls_settings, "tls")
def work(
    url: JournalUrl,
    queues: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="NAME", help="Only this queue; several times."),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="TARGET", help="Only this target; several times."),
    ] = None,
    moved: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="TARGET=ADDRESS", help="Where the calls to a target are "
                     "sent: HOST:PORT, or the URL of a registry with the service."),
    ] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="A module with functions that are "
                     "decorated by with_failback(journal=URL); several times."),
    ] = None,
    retry_on: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", show_default="what the program named that stored the call",
                     help="A status after which a gRPC call is attempted again, also UNAVAILABLE, "
                     "DEADLINE_EXCEEDED and RESOURCE_EXHAUSTED; others make it a dead letter; "
                     "several times."),
    ] = None,
    backoff: Annotated[
        float, typer.Option(metavar="SECONDS", callback=check_seconds, help="Before an attempt is "
                            "repeated; half of it is random.")
    ] = 5.0,
    max_attempts: Annotated[
        int | None, typer.Option(min=1, help="Of a gRPC call, the earlier ones included. Without "
                                 "it, only its maximum age limits them.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", min=0.001, help="The most attempts a second for each "
                     "target."),
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="The most attempts at a time for each target. Without "
                                 "it, as many as the latency of the calls allows.")
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Metadata of each gRPC call, which journals do not "
                     "have, such as credentials. KEY=file:PATH reads it from a file, each time "
                     "anew; KEY=env:NAME from a variable. Others can see arguments."),
    ] = None,
    to_all: Annotated[
        bool, typer.Option("--metadata-to-all-targets", help="Send --metadata to every target in "
                           "the journal. Without it, --metadata needs --target.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Attempt each call that is due, and end.")
    ] = False,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", callback=check_seconds, help="For attempts that run "
                            "when the worker is stopped.")
    ] = 10.0,
    *,
    tls: TlsSettings,
) -> None:  # fmt: skip
    """Deliver the calls in a journal, without the program that has stored them.

    gRPC calls of all queues are sent to their targets, in plaintext unless TLS is chosen. Functions
    must be imported. Ctrl-C and SIGTERM end it with status 0, after running attempts; a second one
    at once. Any number of workers may use a journal at the same time.
    """
    if metadata and not (targets or to_all):
        raise typer.BadParameter(
            "it would be sent to every target in the journal; give --target, or "
            "--metadata-to-all-targets",
            param_hint="--metadata",
        )
    for pair in moved or ():
        _pair(pair, "--map", "TARGET=ADDRESS")
    _import(modules or ())
    worker = JournalWorker(
        url,
        connect=partial(_connect, moved or (), tls),
        queues=queues or None,
        targets=targets or None,
        functions=registered_functions() if modules else (),
        retry_on=tuple(retry_on) if retry_on else None,
        backoff=backoff,
        max_attempts=max_attempts,
        rate=rate,
        max_in_flight=max_in_flight,
        metadata=_metadata(metadata or ()),
        once=once,
    )
    left = 0
    with _logging(), _signals() as is_stopped:
        try:
            worker.start()
            _say(f"delivers the calls in {worker.url}")
            _follow(worker, is_stopped)
            left = worker.count() if once else 0
            worker.close(grace)
        finally:
            worker.close(0)  # after an error, or a second signal
    _say(f"ended: {_counts(worker.stats().values())} whose calls stay in the journal")
    if left:
        _say(
            f"{left:,} call{' is' if left == 1 else 's are'} left: not due yet, skipped, or taken "
            "by others; `rpcwheel journal ls` shows them"
        )
    if worker.failed:
        _say("the journal fails; the log says why")
        raise typer.Exit(1)


def _follow(worker: JournalWorker, is_stopped: Callable[[], bool]) -> None:
    """Wait for the end of the worker; report progress, and each queue and target that it skips."""
    reported: set[tuple[str, str]] = set()
    # The worker may have delivered calls already, which are to be reported.
    printed, next_s = _counts(()), time.monotonic() + PROGRESS_INTERVAL_S
    while True:
        if is_stopped():
            _say("waits for running attempts; a second signal ends them")
            return
        ended = worker.wait(SIGNAL_CHECK_INTERVAL_S)
        for place, reason in worker.skipped.items():
            if place not in reported:
                reported.add(place)
                queue, target = place
                _say(f"skips the calls of {queue}{' to ' if target else ''}{target}: {reason}")
        if ended:
            return
        if time.monotonic() >= next_s:
            counts, next_s = (
                _counts(worker.stats().values()),
                time.monotonic() + PROGRESS_INTERVAL_S,
            )
            if counts != printed:
                printed, left = counts, worker.count()
                _say(f"so far {counts}; {left:,} call{'' if left == 1 else 's'} left")


def _counts(stats: Collection[FailbackStats]) -> str:
    delivered = sum(queue.redelivered for queue in stats)
    dead = sum(queue.gave_up for queue in stats)
    failed = max(0, sum(queue.attempts for queue in stats) - delivered - dead)
    return (
        f"{delivered:,} delivered, {dead:,} given up, "
        f"{failed:,} failed attempt{'' if failed == 1 else 's'}"
    )


def _say(text: str) -> None:
    print("rpcwheel journal work:", printable(text), file=sys.stderr, flush=True)


# Arguments


def _pair(text: str, option: str, shape: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        raise typer.BadParameter(f"give {shape}", param_hint=option)  # not the text: it is secret
    return key, value


def _import(modules: Sequence[str]) -> None:
    """Import modules, also those of the working directory.

    Raises:
        ConfigurationError: One cannot be imported.
    """
    if modules and "" not in sys.path:
        sys.path.insert(0, "")
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ConfigurationError(
                f"cannot import {module}: {type(error).__name__}: {error}"
            ) from error


def _connect(moved: Sequence[str], tls: TlsSettings, target: str) -> grpc.Channel:
    # Not by a dictionary: target and address may have "=" in them, as URLs of registries have.
    pairs = (pair for pair in reversed(moved) if pair.startswith(f"{target}="))
    address = next(pairs, target).removeprefix(f"{target}=")
    if not tls.enabled:
        return insecure_channel(address)
    name = tls.servername
    options = [("grpc.ssl_target_name_override", name)] if name else None
    return secure_channel(address, grpc.ssl_channel_credentials(*tls.pem()), options)


def _metadata(values: Sequence[str]) -> Callable[[], Sequence[tuple[str, str | bytes]]]:
    """Return a function that reads the values, each time anew.

    Raises:
        ConfigurationError: A file or variable cannot be read now, or has what gRPC cannot send.
    """
    pairs = [_pair(value, "--metadata", "KEY=VALUE") for value in values]
    sources = [(key.lower(), source) for key, source in pairs]

    def read() -> Sequence[tuple[str, str | bytes]]:
        return checked_metadata([(key, _value(key, source)) for key, source in sources])

    read()
    return read


def _value(key: str, source: str) -> str | bytes:
    kind, _, name = source.partition(":")
    try:
        if kind == "file":
            source = Path(name).read_text().strip()
        elif kind == "env":
            source = os.environ[name]
        return base64.b64decode(source, validate=True) if key.endswith("-bin") else source
    except KeyError:
        raise ConfigurationError(f"--metadata {key}: there is no variable {name}") from None
    except OSError as error:
        raise ConfigurationError(f"--metadata {key}: {error}") from None
    except ValueError:
        raise ConfigurationError(
            f"--metadata {key}: the value must be text, base64 for -bin"
        ) from None


# The process


@contextmanager
def _logging() -> Iterator[None]:
    """Write what the library logs to stderr."""
    log, handler = logging.getLogger("rpcwheel"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        report_suppressed()
        log.setLevel(level)
        log.removeHandler(handler)


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Note SIGINT and SIGTERM; the second one ends the process. Yields whether there was one."""
    seen: list[int] = []

    def note(signum: int, _frame: object) -> None:
        if seen:
            sys.exit(128 + signum)
        seen.append(signum)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
