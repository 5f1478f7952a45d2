"""`rpcwheel registry ls|watch|register|unregister URL ...`: what a registry has, from a shell.

This is what the words mean; what is then done stands in `registry_jobs.py`. Works with every
backend; without rich the table is plain text.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.errors import ConfigurationError, ExtraMissing, RegistryError
from rpcwheel.instance import ServiceInstance, started_now
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.url import parse_url

from . import registry_jobs
from .diagnosis import printable
from .target import parse_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["add_to"]

LONGEST_S: Final = 1e6
"""Eleven days."""

ENGINES: Final = (
    "sqlite:///path, etcd://HOST:PORT, zookeeper://..., redis://...; with /SERVICE; "
    "headless://HOST:PORT to look only"
)


class _Intermixed(argparse.ArgumentParser):
    """Takes options between the words too, as in `ls URL --json SERVICE`."""

    _inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._inside:
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "registry",
        help="see, follow and change what a registry has",
        description="See, follow and change what a registry has. Exit status 0 if it was done, 1 "
        "if the registry can't be reached, refuses, or does not have it, 2 for a wrong argument "
        "or a missing package, 130 after Ctrl-C.",
    )
    jobs = parser.add_subparsers(dest="job", required=True, metavar="JOB", parser_class=_Intermixed)
    _add_ls(jobs)
    _add_watch(jobs)
    _add_register(jobs)
    _add_unregister(jobs)


def _add_ls(jobs: Any) -> None:
    parser = _job(
        jobs,
        "ls",
        _ls,
        "[SERVICE ...]",
        "show the instances of services",
        "Ask the registry for the instances of services; of all if none is named.",
    )
    parser.add_argument("words", nargs="*", default=[], metavar="SERVICE")
    parser.add_argument("--json", action="store_true", help="one JSON document, for machines")
    parser.add_argument("--plain", action="store_true", help="plain text on a terminal too")


def _add_watch(jobs: Any) -> None:
    parser = _job(
        jobs,
        "watch",
        _watch,
        "SERVICE ...",
        "follow the instances of services",
        "Tell of instances as they come, change, become stale and go, until Ctrl-C.",
    )
    parser.add_argument("words", nargs="*", default=[], metavar="SERVICE")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def _add_register(jobs: Any) -> None:
    parser = _job(
        jobs,
        "register",
        _register,
        "[SERVICE] HOST:PORT",
        "publish an instance, until Ctrl-C",
        "Publish an instance, and again whatever happens to the registry, until Ctrl-C or SIGTERM; "
        "then withdraw it. For servers that can't do so themselves.",
    )
    parser.add_argument("words", nargs="+", metavar="SERVICE HOST:PORT")
    parser.add_argument("--id", default="", help="by which it is known (default HOST:PORT)")
    parser.add_argument("--weight", type=int, default=100, metavar="N",
                        help="its share of the calls, 0 to 1000 (default 100)")  # fmt: skip
    parser.add_argument("--version", default="", metavar="NAME")
    parser.add_argument("--group", default="", metavar="NAME")
    parser.add_argument("--zone", default="", metavar="NAME")
    parser.add_argument("--tls", action="store_true", help="clients reach it over TLS")
    parser.add_argument("--meta", type=_pair, action="append", default=[], metavar="KEY=VALUE",
                        help="more to tell of it; as often as you like")  # fmt: skip
    parser.add_argument(
        "--lease-ttl",
        type=_seconds,
        default=RegistryPolicy().lease_ttl,
        metavar="SECONDS",
        help="after which it is forgotten if this dies (default %(default)g)",
    )


def _add_unregister(jobs: Any) -> None:
    parser = _job(
        jobs,
        "unregister",
        _unregister,
        "[SERVICE] ID",
        "take an instance out",
        "Take an instance out of the registry, whoever has published it, and say who that was. If "
        "that process lives, and does so by rpcwheel, it publishes it again.",
    )
    parser.add_argument("words", nargs="+", metavar="SERVICE ID")


def _job(
    jobs: Any,
    name: str,
    action: Callable[[argparse.Namespace], int],
    words: str,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = jobs.add_parser(
        name, help=summary, description=description, usage=f"%(prog)s [options] URL {words}"
    )
    parser.set_defaults(run=lambda args: _told(action, args))
    parser.add_argument("url", metavar="URL", help=ENGINES)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=RegistryPolicy().timeout,
        metavar="SECONDS",
        help="for each request (default %(default)g)",
    )
    return parser


def _told(action: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Do it, and say what went wrong.

    Returns:
        The exit status.
    """
    try:
        return action(args)
    except (ConfigurationError, ExtraMissing) as error:
        return _failed(error, 2)
    except RegistryError as error:
        return _failed(error, 1)


def _failed(error: Exception, status: int) -> int:
    lines = [printable(line) for line in str(error).splitlines()]
    print("rpcwheel registry:", *lines, file=sys.stderr)
    return status


def _ls(args: argparse.Namespace) -> int:
    services = _services(args.url, args.words)
    return registry_jobs.ls(_place(args), services, machine=args.json, plain=args.plain)


def _watch(args: argparse.Namespace) -> int:
    services = _services(args.url, args.words)
    if not services:
        raise ConfigurationError("name a service: rpcwheel registry watch URL SERVICE")
    return registry_jobs.watch(_place(args), services, machine=args.json)


def _register(args: argparse.Namespace) -> int:
    service, address = _two(args, "HOST:PORT")
    try:
        target = parse_target(address)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    if target.path:
        raise ConfigurationError(f"{address}: others can't reach a unix socket; give HOST:PORT")
    instance = ServiceInstance(
        service=service,
        host=target.host,
        port=target.port,
        id=args.id,
        weight=args.weight,
        version=args.version,
        group=args.group,
        zone=args.zone,
        protocol="grpcs" if args.tls else "grpc",
        metadata=dict(args.meta),
        started_at=started_now(),
    )
    return registry_jobs.register(_place(args), instance)


def _unregister(args: argparse.Namespace) -> int:
    service, name = _two(args, "ID")
    return registry_jobs.unregister(_place(args), service, name)


def _place(args: argparse.Namespace) -> registry_jobs.Place:
    """What an earlier run has seen does not count here: no file."""
    policy = RegistryPolicy(timeout=args.timeout, snapshot=False)
    if "lease_ttl" in args:
        policy = policy.changed(lease_ttl=args.lease_ttl)
    return registry_jobs.Place(args.url, policy)


def _services(url: str, words: Sequence[str]) -> list[str]:
    """Those that are named, each once; the URL may name one too."""
    named = parse_url(url).service
    services = list(dict.fromkeys([*([named] if named else []), *words]))
    for service in services:
        ServiceInstance(service=service, host="checked", port=1)
    return services


def _two(args: argparse.Namespace, second: str) -> tuple[str, str]:
    """The service, which the URL may name instead, and the other word."""
    named = parse_url(args.url).service
    words = args.words
    if len(words) == 1 and named:
        words = [named, *words]
    if len(words) != 2:  # noqa: PLR2004 - the service and the other
        raise ConfigurationError(
            f"give a service and {second}: rpcwheel registry {args.job} URL SERVICE {second}"
        )
    if named and words[0] != named:
        raise ConfigurationError(f"two services are named: {named!r} by the URL, and {words[0]!r}")
    return words[0], words[1]


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"give KEY=VALUE, not {text!r}")
    return key, value


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
