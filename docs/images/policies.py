"""Draws the order of the policies: `python docs/images/policies.py` writes `policies.svg`.

tests/contract/test_documents.py fails if the picture is out of date.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from _svg import GRAY, RED, box, path, picture, text

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

TITLE = "The order in which policies apply to a call"
STYLE = """
.name { font-size: 13px; font-weight: 600 }
.small { font-size: 11px; fill: #59636e }
.box { fill: #f6f8fa; stroke: #8c959f }
.refuses { fill: #fff8c5; stroke: #d4a72c }
.row { fill: none; stroke: #d1d9e0 }
.arrow { fill: none; stroke: #59636e; marker-end: url(#head) }
.back { fill: none; stroke: #d1242f; stroke-dasharray: 4 3; marker-end: url(#back) }
"""


def row(content: Row, y: float) -> Iterator[str]:
    """Draw a row of boxes, each with an arrow to the next one."""
    height = TITLE_HEIGHT + BOX_HEIGHT + 12
    yield box("row", MARGIN, y, WIDTH - 2 * MARGIN, height, 6)
    yield text("small", LEFT, y + 17, content.title)
    xs = [LEFT + number * (BOX_WIDTH + GAP) for number in range(len(content.boxes))]
    middle = y + TITLE_HEIGHT + BOX_HEIGHT / 2
    for x, (name, below) in zip(xs, content.boxes, strict=True):
        kind = "box" if name == "handler" else content.kind
        top = y + TITLE_HEIGHT
        yield box(kind, x, top, BOX_WIDTH, BOX_HEIGHT)
        yield text("name", x + 10, top + 19, name)
        yield text("small", x + 10, top + 36, below)
    for x, after in pairwise(xs):
        yield path("arrow", (x + BOX_WIDTH, middle), (after, middle))


def draw() -> str:
    """Return the picture as SVG."""
    step = TITLE_HEIGHT + BOX_HEIGHT + 12 + ROW_GAP
    y = MARGIN + 24.0
    parts = [
        text(
            "small",
            MARGIN,
            MARGIN + 10,
            "Yellow: may refuse a call or an attempt, with this status.",
        ),
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
        text("small", BACK + 8, refused + 4, "not sent: a failure of the attempt"),
        path(
            "back",
            (right, first + 2 * step),
            (right, first + TITLE_HEIGHT + BOX_HEIGHT / 2),
            (LEFT + 2 * (BOX_WIDTH + GAP) + BOX_WIDTH, first + TITLE_HEIGHT + BOX_HEIGHT / 2),
        ),
        text("small", right - 136, failed + 4, "failed, or refused"),
    ]
    heads = {"head": GRAY, "back": RED}
    return picture(TITLE, (WIDTH, y - ROW_GAP + MARGIN), STYLE, parts, heads=heads)


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
