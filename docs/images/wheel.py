"""Draws the hierarchical timing wheel: `python docs/images/wheel.py` writes `wheel.svg`.

Needs only the standard library. tests/contract/test_documents.py fails if the picture is out of
date.
"""

from html import escape
from math import cos, pi, sin
from pathlib import Path
from typing import Final

PICTURE = Path(__file__).with_name("wheel.svg")

WIDTH, HEIGHT = 960, 330
SLOTS = 16
"""Drawn slots of each level; there are 64."""

LEVELS: Final = (
    ("level 0", "a slot is 1 tick", 3, (6, 11)),
    ("level 1", "a slot is 64 ticks", 5, (8, 13)),
    ("level 2", "a slot is 4,096 ticks", 1, (4,)),
)
"""The name of a level, its slots, the current slot, and the slots with timeouts."""

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>A hierarchical timing wheel: levels of slots, each slot a list of timeouts</title>
<style>
text {{ font-family: ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }}
.name {{ font-size: 14px; font-weight: 600 }}
.small {{ font-size: 12px; fill: #59636e }}
.slot {{ fill: #f6f8fa; stroke: #8c959f }}
.used {{ fill: #ddf4ff; stroke: #54aeff }}
.now {{ fill: #fff8c5; stroke: #d4a72c }}
.arrow {{ fill: none; stroke: #59636e; marker-end: url(#head) }}
</style>
<defs>
<marker id="head" refX="6" refY="3" markerWidth="7" markerHeight="6" orient="auto">\
<path d="M0 0 7 3 0 6z" fill="#59636e"/></marker>
</defs>
<rect width="{width}" height="{height}" fill="#ffffff"/>"""

INNER, OUTER = 58, 96
MIDDLE = 130


def text(kind: str, x: float, y: float, line: str, anchor: str = "middle") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(line)}</text>'


def slot(x: float, number: int, kind: str) -> str:
    """Return a slot of the ring around x."""
    angles = [2 * pi * (number + end) / SLOTS - pi / 2 for end in (0, 1)]
    (a, b), (c, d) = (
        [(x + radius * cos(angle), MIDDLE + radius * sin(angle)) for angle in angles]
        for radius in (OUTER, INNER)
    )
    points = " ".join(f"{px:.1f} {py:.1f}" for px, py in (a, b, d, c))
    return f'<path class="{kind}" d="M{points}z"/>'


def draw() -> str:
    """Return the picture as SVG."""
    parts = []
    xs = [150 + 330 * level for level in range(len(LEVELS))]
    for x, (name, meaning, now, used) in zip(xs, LEVELS, strict=True):
        for number in range(SLOTS):
            kind = "now" if number == now else "used" if number in used else "slot"
            parts.append(slot(x, number, kind))
        parts += [
            text("name", x, MIDDLE - 2, name),
            text("small", x, MIDDLE + 16, "64 slots"),
            text("small", x, MIDDLE + OUTER + 24, meaning),
        ]
    for x, after in zip(xs[1:], xs, strict=False):
        left, right = after + OUTER + 12, x - OUTER - 12
        parts.append(f'<path class="arrow" d="M{right} {MIDDLE} {left} {MIDDLE}"/>')
        parts.append(text("small", (left + right) / 2, MIDDLE - 10, "moves its timeouts"))
    parts += [
        text("small", 24, 290, "Yellow: the current slot; its timeouts are due.", "start"),
        text("small", 24, 310, "Blue: a slot with a list of timeouts.", "start"),
        text("small", 400, 290, "Start: append to the list of one slot. Cancel: unlink.", "start"),
        text("small", 400, 310, "A bitmap for each level finds the next used slot.", "start"),
    ]
    return "\n".join([HEAD.format(width=WIDTH, height=HEIGHT), *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
