"""`rpcwheel doctor HOST:PORT`: why gRPC does not get there, step by step, in plain words.

gRPC says UNAVAILABLE for nearly all that can be wrong. The doctor looks at one thing after the
other, from the name to a health check, and stops where nothing further can work. It needs neither
protobuf nor rich.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from rpcwheel.instance import explicit_target

from . import health, peer
from .diagnosis import Level, Note, Trouble, as_json, as_lines, healthy, spread, verdict
from .target import Target, connect, parse_target, resolve
from .tls import TlsSettings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from .target import Address

__all__ = ["Settings", "add_to", "examine", "run"]

LONGEST_S: Final = 1e6
"""Eleven days: more than anybody waits, and less than sockets and threads can."""

PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
"""What gRPC reads, in this order; no upper case."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line said."""

    target: Target
    tls: TlsSettings = field(default_factory=TlsSettings)
    service: str = ""
    timeout: float = 5.0
    samples: int = 5
    keepalive: float | None = None

    def way(self, address: Address) -> peer.Way:
        """How to get to one of its addresses."""
        name = self.tls.servername or self.target.host or "localhost"
        return peer.Way(address, self.timeout, self.tls, name)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "doctor",
        help="find out why a gRPC server can't be reached",
        description="Look at a gRPC server step by step: name, TCP, TLS, HTTP/2, health, round "
        "trips, and whether it permits keepalive pings. Exit status 0 if calls can work, 1 if "
        "something breaks them, 2 for a wrong argument.",
    )
    parser.set_defaults(run=lambda args: run(settings_of(parser, args), machine=args.json))
    parser.add_argument("target", type=_target, metavar="HOST:PORT", help="or [IPv6]:PORT, unix:/p")
    parser.add_argument(
        "--service", type=_text, default="", help="ask for its health (default: the server's)"
    )
    parser.add_argument("--timeout", type=_seconds, default=5.0, metavar="SECONDS",
                        help="for each step (default 5)")  # fmt: skip
    parser.add_argument("--samples", type=_samples, default=5, metavar="N",
                        help="round trips to measure (default 5)")  # fmt: skip
    parser.add_argument("--keepalive", type=_seconds, metavar="SECONDS",
                        help="would pings so often be refused? takes 3 times that")  # fmt: skip
    parser.add_argument(
        "--tls", action="store_true", help="with TLS; the options below mean it too"
    )
    parser.add_argument("--ca", type=Path, metavar="FILE", help="whom to trust, PEM")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="our certificate (mTLS), PEM")
    parser.add_argument("--key", type=Path, metavar="FILE", help="its private key, PEM")
    parser.add_argument("--servername", type=_name, default="", metavar="NAME",
                        help="whom the certificate has to be for (default: HOST)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")


def settings_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Settings:
    """Check what the arguments mean together.

    Raises:
        SystemExit: With 2, for what can't be.
    """
    if (args.cert is None) != (args.key is None):
        parser.error("--cert and --key go together")
    wanted = args.tls or any((args.ca, args.cert, args.servername))
    tls = TlsSettings(wanted, args.ca, args.cert, args.key, args.servername)
    try:
        if wanted:
            tls.context()
    except (OSError, ValueError) as error:
        given = ", ".join(str(file) for file in (args.ca, args.cert, args.key) if file)
        parser.error(f"{given} can't be used: {error}")
    return Settings(args.target, tls, args.service, args.timeout, args.samples, args.keepalive)


def run(settings: Settings, *, machine: bool = False) -> int:
    """Examine, and tell as it goes (a machine in the end).

    Returns:
        The exit status: 0 if calls can work, else 1.
    """
    notes: list[Note] = []
    if not machine:
        print(f"rpcwheel doctor {settings.target}")
    for note in examine(settings):
        notes.append(note)
        if not machine:
            print("\n".join(as_lines(note)), flush=True)
        elif note.step == "keepalive" and note.level is Level.NOTE:
            print(note.said, file=sys.stderr, flush=True)
    print(as_json(str(settings.target), notes) if machine else verdict(notes))
    return 0 if healthy(notes) else 1


def examine(settings: Settings) -> Iterator[Note]:
    """Look at one thing after the other; ends where nothing further can work."""
    yield from _proxy(settings)
    try:
        addresses = resolve(settings.target, settings.timeout)
    except Trouble as trouble:
        yield Note.failed("name", trouble)
        return
    if not settings.target.path:
        listed = [str(address) for address in addresses]
        said = f"{settings.target.host} is {', '.join(listed)}"
        yield Note("name", Level.OK, said, facts={"addresses": listed})
    reached = yield from _reached(addresses, settings)
    speaking = []
    for address in reached:
        last = None
        for last in peer.protocol(settings.way(address)):
            yield last
        if last is not None and last.level is Level.OK:
            speaking.append(address)
    if speaking:
        yield from _in_use(speaking, settings)


def _reached(addresses: list[Address], settings: Settings) -> Generator[Note, None, list[Address]]:
    """Those that a connection can be made to; gRPC too is content with one of them."""
    reached, troubles = [], []
    for address in addresses:
        try:
            sock, _ = connect(address, settings.timeout)
        except Trouble as why:
            troubles.append((address, why))
        else:
            sock.close()
            reached.append(address)
    for address, trouble in troubles:
        do = "clients go on to the next address" if reached else trouble.do
        level = Level.NOTE if reached else Level.FAIL
        yield Note("tcp", level, f"{address}: {trouble.said}", do)
    for address in reached:
        yield Note("tcp", Level.OK, f"{address}: connected")
    return reached


def _in_use(addresses: list[Address], settings: Settings) -> Iterator[Note]:
    for address in addresses:
        yield from peer.round_trips(settings.way(address), settings.samples)
    with _channel(settings) as channel:
        answer, _ = health.ask(channel, settings.service, settings.timeout)
        yield health.judged(answer, settings.service, settings.timeout)
        if not _hangs(answer):
            yield from _timed(channel, answer, settings)
    for address in addresses if settings.keepalive else ():
        yield from peer.pings_permitted(settings.way(address), settings.keepalive or 0)


def _timed(channel: grpc.Channel, first: health.Answer, settings: Settings) -> Iterator[Note]:
    """How long a health check takes, and whether each has the answer of the first."""
    times: list[float] = []
    for _ in range(settings.samples):
        answer, took = health.ask(channel, settings.service, settings.timeout)
        if health.kind_of(answer) != health.kind_of(first):
            note = health.judged(answer, settings.service, settings.timeout)
            yield Note(
                "call",
                Level.WARN,
                f"after {len(times)} of {settings.samples} health checks another answer: "
                f"{note.said}",
                "it comes and goes: perhaps several servers behind one address, or one that "
                "restarts; its log",
            )
            break
        times.append(took)
    if times:
        said, facts = spread(times)
        yield Note("call", Level.OK, f"{said} for a health check", facts=facts)


def _hangs(answer: health.Answer) -> bool:
    """Whether more of the same would take a timeout each, or tell nothing."""
    ends = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
    return isinstance(answer, health.Failed) and answer.code in ends


def _channel(settings: Settings) -> grpc.Channel:
    options: list[tuple[str, object]] = [("grpc.use_local_subchannel_pool", 1)]
    target = explicit_target(str(settings.target))
    if not settings.tls.wanted:
        plain: grpc.Channel = grpc.insecure_channel(target, options=options)
        return plain
    if settings.tls.servername:
        options.append(("grpc.ssl_target_name_override", settings.tls.servername))
    credentials = grpc.ssl_channel_credentials(*settings.tls.pem())
    channel: grpc.Channel = grpc.secure_channel(target, credentials, options=options)
    return channel


def _proxy(settings: Settings) -> Iterator[Note]:
    """Say that gRPC goes through a proxy of the environment, which the doctor does not."""
    given = next((name for name in PROXIES if os.environ.get(name)), None)
    exempt = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""  # noqa: SIM112
    host = settings.target.host
    if (
        given
        and host
        and not any(host.endswith(one.strip()) for one in exempt.split(",") if one.strip())
    ):
        yield Note(
            "proxy",
            Level.WARN,
            f"gRPC goes through the proxy of ${given}; name to ping were looked at without it",
            f'set no_grpc_proxy={host}, or give the channel ("grpc.enable_http_proxy", 0)',
        )


def _target(text: str) -> Target:
    try:
        return parse_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"give seconds above zero, and at most {LONGEST_S:,.0f}, not {text!r}"
        )
    return seconds


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no text in UTF-8") from None
    return text


def _name(text: str) -> str:
    try:
        text.encode("idna")
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} can be no server's name: {error}") from None
    if "\0" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(f"{text!r} can be no server's name")
    return text


def _samples(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"give a whole number of 1 or more, not {text!r}")
    return int(text)
