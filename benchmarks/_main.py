"""What `python -m benchmarks.NAME` has in common: the options, and where the page goes."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import _page
from benchmarks._pages import DOCS, write
from benchmarks.calls.scale import Results, Row
from benchmarks.calls.subjects import Skipped

_BEGAN_S = time.monotonic()


@dataclass(frozen=True, slots=True)
class Program:
    """One benchmark program."""

    name: str
    about: str | None
    takes: str  # with --quick
    steps: Collection[str]

    def parser(self) -> argparse.ArgumentParser:
        """The parser of the options that all programs have."""
        parser = argparse.ArgumentParser(prog=f"python -m {self._module}", description=self.about)
        parser.add_argument("--quick", action="store_true", help=f"less of all; {self.takes}")
        parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(self.steps)}")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
        parser.add_argument("--out", type=Path, metavar="DIR", help="write the page there")
        return parser

    def asked(self, options: argparse.Namespace) -> frozenset[str] | None:
        """The steps to run; None if some are unknown, after a message on stderr."""
        only = frozenset(options.only.split(",")) if options.only else frozenset(self.steps)
        if unknown := sorted(only.difference(self.steps)):
            print(
                f"--only takes {', '.join(self.steps)}; not {', '.join(unknown)}", file=sys.stderr
            )
            return None
        return only

    @property
    def command(self) -> str:
        """The command line, without the paths of files."""
        given, places = iter(sys.argv[1:]), ("--json", "--out")
        words = [word for word in given if word not in places or not next(given, "")]
        return " ".join([f"python -m {self._module}", *words])

    def place(self, options: argparse.Namespace, only: frozenset[str]) -> Path | None:
        """The directory for the page, made if need be; None: it is only printed."""
        complete = not options.quick and only == frozenset(self.steps)
        out: Path | None = options.out or (DOCS if complete else None)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        return out

    def publish(self, page: str, out: Path | None) -> None:
        """Print the page, and write it with what is made from its tables."""
        minutes = (time.monotonic() - _BEGAN_S) / 60
        page = re.sub(
            r"^(\* Command: .*)$", rf"\1\n* Took: {minutes:.1f} minutes", page, flags=re.MULTILINE
        )
        print(page)
        if out is None:
            print("Not written: only a whole run goes to docs/benchmarks; --out says where else.")
        else:
            write(self.name, page, out)

    @property
    def _module(self) -> str:
        return f"benchmarks.{self.name}"


def write_rows(options: argparse.Namespace, rows: Sequence[object]) -> None:
    """Write all figures as JSON, if that was asked for."""
    if options.json is not None:
        options.json.write_text(json.dumps(rows, default=asdict, indent=1) + "\n")


def main(
    program: Program,
    run: Callable[[frozenset[str], str], Iterable[Row | Skipped]],
    page: Callable[..., str],
    *,
    scales: dict[str, Any],
    facts: Callable[[str], dict[str, str]],
) -> int:
    """Run, print, write; for those whose rows are of `benchmarks.calls.scale`."""
    options = program.parser().parse_args()
    only = program.asked(options)
    if only is None:
        return 2
    known, scale = facts(_page.load()), "quick" if options.quick else "full"
    results = list(run(only, scale))
    rows = tuple(each for each in results if isinstance(each, Row))
    write_rows(options, rows)
    skipped = [each for each in results if isinstance(each, Skipped)]
    origin = _page.Origin(known, skipped, program.command)
    shown = page(Results(rows), scales[scale], origin=origin)
    program.publish(shown, program.place(options, only))
    return 0
