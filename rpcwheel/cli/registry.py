"""`rpcwheel registry ls|watch|register|unregister URL ...`: a registry from the command line.

This module parses the arguments; `registry_jobs.py` does the work. It works with every backend.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.errors import ConfigurationError, ExtraMissing, RegistryError
from rpcwheel.instance import ServiceInstance, started_now
from rpcwheel.registry.backends import check_writable
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.url import parse_url

from . import registry_jobs
from .diagnosis import printable
from .target import parse_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["add_to"]

LONGEST_S: Final = 1e6
"""The largest value for an option in seconds: eleven days."""

URL_HELP: Final = (
    "sqlite:///FILE, etcd://HOST:PORT, zookeeper://HOST:PORT, redis://HOST:PORT, optionally with "
    "/SERVICE (sqlite: ?service=SERVICE); headless://HOST:PORT is read only"
)


class _IntermixedParser(argparse.ArgumentParser):
    """Accepts options between the positional arguments, as in `ls URL --json SERVICE`."""

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
    """Add the command `registry` and its arguments."""
    parser = commands.add_parser(
        "registry",
        help="show, watch and change the instances in a registry",
        description="Show, watch and change the instances in a registry. Exit status: 0 success; 1 "
        "the registry does not answer or refuses, or there is no such service or instance; 2 a "
        "wrong argument or a missing package; 130 after Ctrl-C.",
    )
    jobs = parser.add_subparsers(
        dest="job", required=True, metavar="JOB", parser_class=_IntermixedParser
    )
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
        "Show the instances of services; of all services if none is named.",
    )
    parser.add_argument("words", nargs="*", default=[], metavar="SERVICE")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plain", action="store_true", help="no colors on a terminal")


def _add_watch(jobs: Any) -> None:
    parser = _job(
        jobs,
        "watch",
        _watch,
        "SERVICE ...",
        "show changes of services as they happen",
        "Show the instances of services, and each change, until Ctrl-C: = present, + added, "
        "~ changed, ? stale, - removed, ! a message about the registry.",
    )
    parser.add_argument("words", nargs="*", default=[], metavar="SERVICE")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def _add_register(jobs: Any) -> None:
    parser = _job(
        jobs,
        "register",
        _register,
        "[SERVICE] HOST:PORT",
        "publish an instance, until Ctrl-C",
        "Publish an instance and keep it published, whatever happens to the registry, until Ctrl-C "
        "or SIGTERM; then withdraw it. For servers that do not do so themselves.",
    )
    parser.add_argument("words", nargs="+", metavar="SERVICE HOST:PORT")
    parser.add_argument("--id", default="", help="its id (default HOST:PORT)")
    parser.add_argument("--weight", type=int, default=100, metavar="N",
                        help="its share of the calls, 0 to 1000 (default 100)")  # fmt: skip
    parser.add_argument("--version", default="", metavar="NAME")
    parser.add_argument("--group", default="", metavar="NAME")
    parser.add_argument("--zone", default="", metavar="NAME")
    parser.add_argument("--tls", action="store_true", help="clients connect with TLS")
    parser.add_argument("--meta", type=_pair, action="append", default=[], metavar="KEY=VALUE",
                        help="metadata; may be given several times")  # fmt: skip
    parser.add_argument(
        "--lease-ttl",
        type=_seconds,
        default=RegistryPolicy().lease_ttl,
        metavar="SECONDS",
        help="if this process dies, the registry removes the instance after so many seconds "
        "(default %(default)g)",
    )


def _add_unregister(jobs: Any) -> None:
    parser = _job(
        jobs,
        "unregister",
        _unregister,
        "[SERVICE] ID",
        "remove an instance",
        "Remove an instance from the registry, whichever process has published it, and show that "
        "process. If it still runs and uses rpcwheel, it publishes the instance again.",
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
    parser.set_defaults(run=lambda args: _run(action, args))
    parser.add_argument("url", metavar="URL", help=URL_HELP)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=RegistryPolicy().timeout,
        metavar="SECONDS",
        help="limit for each request (default %(default)g)",
    )
    return parser


def _run(action: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a job and print its error; return the exit status."""
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
    return registry_jobs.ls(_access(args), services, as_json=args.json, plain=args.plain)


def _watch(args: argparse.Namespace) -> int:
    services = _services(args.url, args.words)
    if not services:
        raise ConfigurationError("name a service: rpcwheel registry watch URL SERVICE")
    return registry_jobs.watch(_access(args), services, as_json=args.json)


def _register(args: argparse.Namespace) -> int:
    service, address = _service_and(args, "HOST:PORT")
    try:
        target = parse_target(address)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    if target.path:
        raise ConfigurationError(
            f"{address}: other machines cannot reach a unix socket; give HOST:PORT"
        )
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
    return registry_jobs.register(_access(args), instance)


def _unregister(args: argparse.Namespace) -> int:
    service, instance_id = _service_and(args, "ID")
    return registry_jobs.unregister(_access(args), service, instance_id)


def _access(args: argparse.Namespace) -> registry_jobs.RegistryAccess:
    """The registry, without the snapshot file: only what the registry answers now is shown."""
    policy = RegistryPolicy(timeout=args.timeout, snapshot=False)
    if "lease_ttl" in args:
        policy = policy.replace(lease_ttl=args.lease_ttl)
    return registry_jobs.RegistryAccess(args.url, policy)


def _services(url: str, words: Sequence[str]) -> list[str]:
    """The services that the URL and the arguments name, each once."""
    named = parse_url(url).service
    services = list(dict.fromkeys([*([named] if named else []), *words]))
    for service in services:
        ServiceInstance(service=service, host="checked", port=1)
    return services


def _service_and(args: argparse.Namespace, second: str) -> tuple[str, str]:
    """The service, which the URL may name too, and a second argument."""
    url = parse_url(args.url)
    check_writable(url)
    named = url.service
    words = args.words
    if len(words) == 1 and named:
        words = [named, *words]
    if len(words) != 2:  # noqa: PLR2004 - the service and the second argument
        raise ConfigurationError(
            f"give a service and {second}: rpcwheel registry {args.job} URL SERVICE {second}"
        )
    if named and words[0] != named:
        raise ConfigurationError(f"two services are named: {named!r} in the URL, and {words[0]!r}")
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
