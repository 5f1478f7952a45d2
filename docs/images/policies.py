"""Draws the order of the policies: `python docs/images/policies.py` writes `policies.svg`.

Needs only the standard library. tests/contract/test_package.py fails if the picture is out of date.
"""

from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

PICTURE = Path(__file__).with_name("policies.svg")


class Row(NamedTuple):
    """What is done together: its title, the boxes in their order, and their class."""

    title: str
    kind: str
    boxes: tuple[tuple[str, str], ...]


ROWS: Final = (
    Row(
        "once for each call",
        "box",
        (
            ("default response", "or failback answers"),
            ("deadline", "of all attempts"),
            ("retry or hedging", "makes the attempts"),
        ),
    ),
    Row(
        "for each attempt, by target and method",
        "refuses",
        (
            ("circuit breaker", "UNAVAILABLE"),
            ("throttle", "UNAVAILABLE"),
            ("rate", "RESOURCE_EXHAUSTED"),
            ("concurrency limit", "RESOURCE_EXHAUSTED"),
        ),
    ),
    Row(
        "for each attempt that is sent",
        "box",
        (
            ("attempts are counted", "metrics"),
            ("balancer", "chooses a server"),
            ("connection", "can be replaced"),
        ),
    ),
    Row(
        "in the server",
        "refuses",
        (
            ("limit and rate", "RESOURCE_EXHAUSTED"),
            ("handler", ""),
        ),
    ),
)

WIDTH, MARGIN = 960, 16
BOX_WIDTH, BOX_HEIGHT, GAP = 196, 46, 26
TITLE_HEIGHT, ROW_GAP = 26, 26
LEFT = 2 * MARGIN
BACK = LEFT + 2 * (BOX_WIDTH + GAP) + BOX_WIDTH / 2
"""The middle of the box that gets the failures."""

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The order in which policies apply to a call</title>
<style>
text {{ font-family: ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }}
.name {{ font-size: 13px; font-weight: 600 }}
.small {{ font-size: 11px; fill: #59636e }}
.box {{ fill: #f6f8fa; stroke: #8c959f }}
.refuses {{ fill: #fff8c5; stroke: #d4a72c }}
.row {{ fill: none; stroke: #d1d9e0 }}
.arrow {{ fill: none; stroke: #59636e; marker-end: url(#head) }}
.back {{ fill: none; stroke: #d1242f; stroke-dasharray: 4 3; marker-end: url(#back) }}
</style>
<defs>
<marker id="head" refX="6" refY="3" markerWidth="7" markerHeight="6" orient="auto">\
<path d="M0 0 7 3 0 6z" fill="#59636e"/></marker>
<marker id="back" refX="6" refY="3" markerWidth="7" markerHeight="6" orient="auto">\
<path d="M0 0 7 3 0 6z" fill="#d1242f"/></marker>
</defs>
<rect width="{width}" height="{height}" fill="#ffffff"/>"""


def small(x: float, y: float, text: str) -> str:
    """Return a line of small text."""
    return f'<text class="small" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def box(x: float, y: float, name: str, below: str, kind: str) -> str:
    """Return a box with a name, and a line below it."""
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
        f'rx="4"/>\n<text class="name" x="{x + 10:g}" y="{y + 19:g}">{escape(name)}</text>\n'
        + small(x + 10, y + 36, below)
    )


def path(kind: str, *points: tuple[float, float]) -> str:
    """Return lines from point to point."""
    steps = " ".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path class="{kind}" d="M{steps}"/>'


def row(content: Row, y: float) -> Iterator[str]:
    """Draw a row of boxes, each with an arrow to the next one."""
    height = TITLE_HEIGHT + BOX_HEIGHT + 12
    yield (
        f'<rect class="row" x="{MARGIN}" y="{y:g}" width="{WIDTH - 2 * MARGIN}" '
        f'height="{height}" rx="6"/>'
    )
    yield small(LEFT, y + 17, content.title)
    xs = [LEFT + number * (BOX_WIDTH + GAP) for number in range(len(content.boxes))]
    middle = y + TITLE_HEIGHT + BOX_HEIGHT / 2
    for x, (name, below) in zip(xs, content.boxes, strict=True):
        kind = "box" if name == "handler" else content.kind
        yield box(x, y + TITLE_HEIGHT, name, below, kind)
    for x, after in pairwise(xs):
        yield path("arrow", (x + BOX_WIDTH, middle), (after, middle))


def draw() -> str:
    """Return the picture as SVG."""
    step = TITLE_HEIGHT + BOX_HEIGHT + 12 + ROW_GAP
    y = MARGIN + 24.0
    parts = [
        small(MARGIN, MARGIN + 10, "Yellow: may refuse a call or an attempt, with this status."),
    ]
    for number, content in enumerate(ROWS):
        parts += row(content, y)
        if number:
            parts.append(path("arrow", (LEFT + 98, y - ROW_GAP), (LEFT + 98, y)))
        y += step
    first = MARGIN + 24
    refused, failed = first + step - ROW_GAP / 2, first + 2 * step - ROW_GAP / 2
    right = WIDTH - MARGIN - 14
    parts += [
        path("back", (BACK, first + step), (BACK, first + TITLE_HEIGHT + BOX_HEIGHT)),
        small(BACK + 8, refused + 4, "not sent: a failure of the attempt"),
        path(
            "back",
            (right, first + 2 * step),
            (right, first + TITLE_HEIGHT + BOX_HEIGHT / 2),
            (LEFT + 2 * (BOX_WIDTH + GAP) + BOX_WIDTH, first + TITLE_HEIGHT + BOX_HEIGHT / 2),
        ),
        small(right - 136, failed + 4, "failed, or refused"),
    ]
    head = HEAD.format(width=WIDTH, height=round(y - ROW_GAP + MARGIN))
    return "\n".join([head, *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
