"""Print a seeded sample of mutants of the modules that decide: candidates for `killed.csv`.

    python tests/mutation/generate.py > candidates.csv

A mutant changes one line: an operator, a number, True or False, `break` or `continue`, a condition,
a default, a returned value, or a statement that is a call. Annotations, decorators, texts,
assertions, `__repr__`, log calls and `if TYPE_CHECKING` stay. Rows of `killed.csv` are left out.
"""

import argparse
import ast
import csv
import io
import itertools
import random
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWS = {"cli", "events", "status", "testing"}
"""Packages that show what others decide."""

LOGS = {"_log", "_LOG", "log", "logger", "warnings"}
PRESENTATION = {"stacklevel", "repr", "name", "daemon", "slots", "kw_only", "frozen", "eq"}
"""Keywords whose values decide nothing."""

PAIRS = ("< <=", "> >=", "== !=", "and or", "+ -", "* //", "+= -=", "break continue", "True False")
SWAPS = dict(pair.split() for pair in PAIRS) | dict(reversed(pair.split()) for pair in PAIRS)
SWAPS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in", "not": "", "/": "*"}

Position = tuple[int, int]
"""A line, counted from 1, and a byte in it."""


def span(node: ast.AST) -> tuple[Position, Position]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def left_alone(node: ast.AST) -> list[ast.AST]:
    """The parts of a node that are not mutated."""
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__" | "__del__") | ast.Assert():
            return [node]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.JoinedStr():
            return [node]
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in LOGS:
            return [node]
        case ast.keyword(arg=name) if name in PRESENTATION:
            return [node]
    parts = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [*filter(None, parts), *getattr(node, "decorator_list", [])]


def replaced(node: ast.AST, returns: str) -> Iterator[tuple[Position, Position, str]]:
    """The mutants of a node that replace an expression or a statement."""
    match node:
        case ast.Return(value=ast.expr() as value) if "None" in returns:
            yield *span(value), "None"
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            yield *span(node), "pass"
        case ast.arguments():
            for default in [*node.defaults, *filter(None, node.kw_defaults)]:
                yield *span(default), "None"
        case ast.If(test=test) | ast.IfExp(test=test) if isinstance(
            test, ast.Name | ast.Attribute | ast.Call
        ):
            yield span(test)[0], span(test)[0], "not "


def changed_tokens(text: str) -> Iterator[tuple[Position, Position, str]]:
    """The mutants of a module that replace an operator, a name or a number."""
    tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
    for token, after in itertools.pairwise(tokens):
        both = f"{token.string} {after.string}"
        if both in SWAPS:
            yield token.start, after.end, SWAPS[both]
        elif token.string in SWAPS and token.type in {tokenize.OP, tokenize.NAME}:
            yield token.start, token.end, SWAPS[token.string]
        elif token.type == tokenize.NUMBER:
            yield token.start, token.end, f"{ast.literal_eval(token.string) + 1}"
            yield token.start, token.end, f"{ast.literal_eval(token.string) - 1}"


def mutants(path: Path) -> Iterator[dict[str, str]]:
    """All mutants of a module, as rows of `killed.csv`; some are not valid Python."""
    text = path.read_text()
    lines, nodes = text.split("\n"), [*ast.walk(ast.parse(text))]
    alone = [span(part) for node in nodes for part in left_alone(node)]
    returns: dict[ast.AST, str] = {}
    for node in nodes:
        if getattr(node, "returns", None):
            returns |= dict.fromkeys(ast.walk(node), ast.unparse(node.returns))
    edits = (edit for node in nodes for edit in replaced(node, returns.get(node, "")))
    for start, end, new in itertools.chain(edits, changed_tokens(text)):
        before = lines[start[0] - 1]
        after = before[: start[1]] + new + before[end[1] :]
        if start[0] == end[0] and not any(a <= start and end <= b for a, b in alone):
            nth = lines[1 : start[0] - 1].count(before)
            row = (str(path.relative_to(ROOT)), str(nth), before, after)
            yield dict(zip(("module", "nth", "before", "after"), row, strict=True))


def is_valid(row: dict[str, str]) -> bool:
    """Whether a mutant is Python, and another program."""
    old = Path(ROOT, row["module"]).read_text()
    try:
        new = ast.dump(ast.parse(old.replace(row["before"], row["after"])))
    except SyntaxError:
        return False
    return new != ast.dump(ast.parse(old)) and "super()" not in row["before"]


def main() -> None:
    """Print more rows of a module, the more mutants it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--most", type=int, default=9, help="rows of a module, with the old ones")
    arguments = parser.parse_args()
    with Path(__file__).with_name("killed.csv").open(newline="") as file:
        old = list(csv.DictReader(file))
    out = csv.DictWriter(sys.stdout, ["module", "nth", "before", "after"], lineterminator="\n")
    out.writeheader()
    for path in sorted(ROOT.glob("rpcwheel/**/*.py")):
        if SHOWS.isdisjoint(path.parts):
            rows = [row for row in mutants(path) if row not in old]
            count = min(arguments.most, 1 + len(rows) // 20)
            count -= sum(row["module"] == str(path.relative_to(ROOT)) for row in old)
            random.Random(f"{arguments.seed} {path.stem}").shuffle(rows)
            out.writerows(itertools.islice(filter(is_valid, rows), max(count, 0)))


if __name__ == "__main__":
    main()
