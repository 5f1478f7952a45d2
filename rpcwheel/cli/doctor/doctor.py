"""`rpcwheel doctor HOST:PORT`: find out why a gRPC server cannot be reached.

gRPC reports UNAVAILABLE for nearly everything that can be wrong. The doctor checks one step after
the other, from the name to a health check, and ends where the next step cannot work.
"""

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Annotated, Final

import grpc
import typer

from rpcwheel.cli.findings import (
    DoctorFinding,
    Level,
    Problem,
    as_json,
    as_lines,
    distribution,
    healthy,
    summary,
)
from rpcwheel.cli.parameters import check_seconds, tls_settings, with_options
from rpcwheel.cli.target import Address, ServerTarget, connect, parse_target, resolve
from rpcwheel.instance import explicit_target

from . import health, peer
from .tls import TlsSettings

PROXY_VARIABLES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables that gRPC reads; lower case only. The first that is set counts, even if it is
empty."""

PATH_AS_NAME: Final = Problem(
    "gRPC requires a certificate for the path of the socket, as if it were the name of a host",
    "pass --servername NAME with a name of the certificate "
    '(clients: the option ("grpc.ssl_target_name_override", NAME))',
)


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """The options of the command line."""

    target: ServerTarget
    tls: TlsSettings
    service: str
    timeout: float
    samples: int
    keepalive: float | None

    def endpoint(self, address: Address) -> peer.Endpoint:
        """Return the endpoint for one of the target's addresses."""
        name = self.tls.servername or self.target.host
        return peer.Endpoint(address, self.timeout, self.tls, name)


def _check_service(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{name!r} is not valid UTF-8") from None
    return name


@with_options(tls_settings, "tls")
def doctor(
    target: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="The server; or [IPv6]:PORT, unix:/path.")
    ],
    service: Annotated[
        str,
        typer.Option(callback=_check_service, help="Check the health of this service, not of the "
                     "server."),
    ] = "",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", callback=check_seconds, help="Limit for each step.")
    ] = 5.0,
    samples: Annotated[int, typer.Option(min=1, help="How many round trips to measure.")] = 5,
    keepalive: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", callback=check_seconds, help="Test whether the server "
                     "refuses keepalive pings at this interval. Takes three times as long."),
    ] = None,
    *,
    tls: TlsSettings,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:  # fmt: skip
    """Find out why a gRPC server cannot be reached.

    Checks name, TCP, TLS, HTTP/2, health, round trips, and whether the server permits keepalive
    pings. Exit status: 0 if calls can work, 1 if not, 2 for a wrong argument.
    """
    try:
        parsed = parse_target(target)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="HOST:PORT") from None
    settings = DoctorSettings(parsed, tls, service, timeout, samples, keepalive)
    findings: list[DoctorFinding] = []
    if not json:
        print(f"rpcwheel doctor {settings.target}")
    for finding in examine(settings):
        findings.append(finding)
        if not json:
            print("\n".join(as_lines(finding)), flush=True)
        elif finding.step == "keepalive" and finding.level is Level.NOTE:
            print(finding.message, file=sys.stderr, flush=True)
    print(as_json(str(settings.target), findings) if json else summary(findings))
    raise typer.Exit(0 if healthy(findings) else 1)


def examine(settings: DoctorSettings) -> Iterator[DoctorFinding]:
    """Check one step after the other; end where the next step cannot work."""
    yield from _proxy(settings)
    try:
        addresses = resolve(settings.target, settings.timeout)
    except Problem as problem:
        yield DoctorFinding.failed("name", problem)
        return
    if not settings.target.path:
        listed = [str(address) for address in addresses]
        message = f"{settings.target.host} resolves to {', '.join(listed)}"
        yield DoctorFinding("name", Level.OK, message, facts={"addresses": listed})
    reachable = yield from _reachable(addresses, settings)
    if reachable and settings.tls.enabled and not (settings.tls.servername or settings.target.host):
        yield DoctorFinding.failed("tls", PATH_AS_NAME)
        return
    usable = []
    for address in reachable:
        last = None
        for last in peer.protocol(settings.endpoint(address)):
            yield last
        if last is not None and last.level is Level.OK:
            usable.append(address)
    if usable:
        yield from _calls(usable, settings)


def _reachable(
    addresses: list[Address], settings: DoctorSettings
) -> Generator[DoctorFinding, None, list[Address]]:
    """Return the addresses that accept a connection. gRPC too needs only one of them."""
    reachable, failed = [], []
    for address in addresses:
        try:
            sock, _ = connect(address, settings.timeout)
        except Problem as problem:
            failed.append((address, problem))
        else:
            sock.close()
            reachable.append(address)
    for address, reason in failed:
        level = Level.NOTE if reachable else Level.FAIL
        advice = "clients try the next address" if reachable else reason.advice
        yield DoctorFinding("tcp", level, f"{address}: {reason.message}", advice)
    for address in reachable:
        yield DoctorFinding("tcp", Level.OK, f"{address}: connected")
    return reachable


def _calls(addresses: list[Address], settings: DoctorSettings) -> Iterator[DoctorFinding]:
    for address in addresses:
        yield from peer.round_trips(settings.endpoint(address), settings.samples)
    with _channel(settings) as channel:
        result, _ = health.check(channel, settings.service, settings.timeout)
        yield health.finding_for(result, settings.service, settings.timeout)
        if not _times_out(result):
            yield from _latency(channel, result, settings)
    for address in addresses if settings.keepalive else ():
        yield from peer.check_keepalive(settings.endpoint(address), settings.keepalive or 0)


def _latency(
    channel: grpc.Channel, first: health.Result, settings: DoctorSettings
) -> Iterator[DoctorFinding]:
    """Measure health checks, as long as each has the result of the first."""
    times: list[float] = []
    for _ in range(settings.samples):
        result, took = health.check(channel, settings.service, settings.timeout)
        if not health.same(result, first):
            other = health.finding_for(result, settings.service, settings.timeout)
            yield DoctorFinding(
                "call",
                Level.WARN,
                f"a different result after {len(times)} of {settings.samples} health checks: "
                f"{other.message}",
                "there may be several servers behind one address, or one that restarts: look into "
                "its log",
            )
            break
        times.append(took)
    if times:
        text, facts = distribution(times)
        yield DoctorFinding("call", Level.OK, f"{text} for a health check", facts=facts)


def _times_out(result: health.Result) -> bool:
    """Return whether further health checks would take a timeout each, or show nothing new."""
    codes = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
    return isinstance(result, health.CallFailed) and result.code in codes


def _channel(settings: DoctorSettings) -> grpc.Channel:
    options: list[tuple[str, object]] = [("grpc.use_local_subchannel_pool", 1)]
    target = explicit_target(str(settings.target))
    if settings.tls.servername:
        options.append(("grpc.ssl_target_name_override", settings.tls.servername))
    channel: grpc.Channel = (
        grpc.secure_channel(
            target, grpc.ssl_channel_credentials(*settings.tls.pem()), options=options
        )
        if settings.tls.enabled
        else grpc.insecure_channel(target, options=options)
    )
    return channel


def _proxy(settings: DoctorSettings) -> Iterator[DoctorFinding]:
    """Report that gRPC uses a proxy of the environment, which the doctor does not."""
    variable = next((name for name in PROXY_VARIABLES if name in os.environ), "")
    is_used = os.environ.get(variable, "").lower().startswith("http://")
    exempt = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))  # noqa: SIM112
    host = settings.target.host
    if is_used and host and not any(_exempts(entry.strip(), host) for entry in exempt.split(",")):
        yield DoctorFinding(
            "proxy",
            Level.WARN,
            f"gRPC uses the proxy of ${variable}; the steps from name to ping are without it",
            f'set no_grpc_proxy={host}, or give the channel ("grpc.enable_http_proxy", 0)',
        )


def _exempts(entry: str, host: str) -> bool:
    """Whether gRPC uses no proxy for a host: its name ends so, or its address is in the network."""
    if entry.rpartition("/")[2].isdecimal():
        with suppress(ValueError):
            return ip_address(host) in ip_network(entry, strict=False)
    return bool(entry) and host.lower().endswith(entry.lower())
