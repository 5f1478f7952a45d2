"""Draws the hierarchical timing wheel: `python docs/images/wheel.py` writes `wheel.svg`.

tests/contract/test_documents.py fails if the picture is out of date.
"""

from math import cos, pi, sin
from pathlib import Path
from typing import Final

from _svg import path, picture, text

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

TITLE = "A hierarchical timing wheel: levels of slots, each slot a list of timeouts"
STYLE = """
.name { font-size: 14px; font-weight: 600 }
.small { font-size: 12px; fill: #59636e }
.slot { fill: #f6f8fa; stroke: #8c959f }
.used { fill: #ddf4ff; stroke: #54aeff }
.now { fill: #fff8c5; stroke: #d4a72c }
.arrow { fill: none; stroke: #59636e; marker-end: url(#head) }
"""

INNER, OUTER = 58, 96
MIDDLE = 130


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
            text("name", x, MIDDLE - 2, name, "middle"),
            text("small", x, MIDDLE + 16, "64 slots", "middle"),
            text("small", x, MIDDLE + OUTER + 24, meaning, "middle"),
        ]
    for x, after in zip(xs[1:], xs, strict=False):
        left, right = after + OUTER + 12, x - OUTER - 12
        parts.append(path("arrow", (right, MIDDLE), (left, MIDDLE)))
        parts.append(text("small", (left + right) / 2, MIDDLE - 10, "moves its timeouts", "middle"))
    parts += [
        text("small", 24, 290, "Yellow: the current slot; its timeouts are due."),
        text("small", 24, 310, "Blue: a slot with a list of timeouts."),
        text("small", 400, 290, "Start: append to the list of one slot. Cancel: unlink."),
        text("small", 400, 310, "A bitmap for each level finds the next used slot."),
    ]
    return picture(TITLE, (WIDTH, HEIGHT), STYLE, parts)


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
