"""Draws the layers of packages: `python docs/images/packages.py` writes `packages.svg`.

The layers are the contracts of import-linter in pyproject.toml.
tests/contract/test_documents.py fails if the picture is out of date.
"""

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import wrap

from _svg import box, picture, text

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_name("packages.svg")

WIDTH = 960
MARGIN = 16
GAP = 8
TITLE_HEIGHT = 26
LINE_HEIGHT = 14
CHARACTERS_PER_LINE = 19
MIN_BOX_WIDTH = 144
NOTES = (
    "A package imports lower layers only, none beside it. Blue: decides",
    "without I/O, as a whole or in the modules named in it.",
)
TITLE = "The packages of rpcwheel in layers. A package imports lower layers only."
STYLE = """
.name { font-size: 14px; font-weight: 600 }
.small { font-size: 11px; fill: #59636e }
.box { fill: #f6f8fa; stroke: #8c959f }
.pure { fill: #ddf4ff; stroke: #54aeff }
"""


def contracts() -> dict[str, dict[str, list[str]]]:
    """Return the contracts of import-linter by their types; of several, the first."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    by_type: dict[str, dict[str, list[str]]] = {}
    for contract in config["tool"]["importlinter"]["contracts"]:
        by_type.setdefault(contract["type"], contract)
    return by_type


def decision_modules(patterns: list[str]) -> dict[str, list[str]]:
    """Return the modules without I/O of each package; a top-level module has an empty list."""
    paths = sorted((ROOT / "rpcwheel").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    by_package: dict[str, list[str]] = {}
    for name in names:
        if any(fnmatchcase(name, pattern.replace("**", "*")) for pattern in patterns):
            _, package, *rest = name.split(".")
            by_package.setdefault(package, []).extend(rest[-1:])
    return by_package


def layer(names: list[str], pure: dict[str, list[str]], y: float, height: float) -> Iterator[str]:
    """Draw one layer, in the middle of the picture."""
    width = max(MIN_BOX_WIDTH, *(9 * len(name) + 20 for name in names))
    x = (WIDTH - len(names) * (width + GAP) + GAP) / 2
    for name in names:
        yield box("pure" if name in pure else "box", x, y, width, height)
        yield text("name", x + 10, y + 18, name)
        for number, line in enumerate(lines_of(pure.get(name, []))):
            yield text("small", x + 10, y + TITLE_HEIGHT + 8 + number * LINE_HEIGHT, line)
        x += width + GAP


def lines_of(modules: list[str]) -> list[str]:
    """Return the names of modules, in lines that fit into a box."""
    return wrap(", ".join(modules), CHARACTERS_PER_LINE, break_on_hyphens=False)


def draw() -> str:
    """Return the picture as SVG."""
    by_type = contracts()
    pure = decision_modules(by_type["forbidden"]["source_modules"])
    y = MARGIN + 2.0
    parts = [
        text("small", MARGIN, y + 8 + number * LINE_HEIGHT, line)
        for number, line in enumerate(NOTES)
    ]
    y += 2 * LINE_HEIGHT + GAP
    for row in by_type["layers"]["layers"]:
        names = [name.strip() for name in row.split("|")]
        lines = max(len(lines_of(pure.get(name, []))) for name in names)
        height = TITLE_HEIGHT + lines * LINE_HEIGHT + (4 if lines else 0)
        parts += layer(names, pure, y, height)
        y += height + GAP
    return picture(TITLE, (WIDTH, y + MARGIN - GAP), STYLE, parts, heads={})


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
