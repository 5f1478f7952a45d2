"""Draws what becomes of a call of failback if the process dies.

`python docs/images/delivery.py` writes `delivery.svg`.
tests/contract/test_documents.py fails if the picture is out of date. It is narrow, so that its text
can be read on a phone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from _svg import box, path, picture, text

PICTURE = Path(__file__).with_name("delivery.svg")


class Step(NamedTuple):
    """What happens to the call, and what becomes of it if the process dies after that."""

    name: str
    below: str
    in_memory: tuple[str, ...] = ()
    """Lines of text; a line that begins with "!" is red."""
    with_journal: tuple[str, ...] = ()


STEPS: Final = (
    Step(
        "first attempt fails",
        "retries are over",
        ("not queued; the caller", "has no answer"),
        ("not queued; the caller", "has no answer"),
    ),
    Step(
        "the call is queued",
        "the journal confirms",
        ("lost; the caller", "has no answer"),
        ("delivered, although the", "caller has no answer"),
    ),
    Step(
        "the caller is answered",
        "default response",
        ("!lost, reported only at", "!an exit, not at a kill"),
        ("delivered by another", "process after its lease"),
    ),
    Step(
        "an attempt is sent",
        "after the backoff",
        ("!lost, and perhaps", "!executed"),
        ("attempted again, perhaps", "executed before"),
    ),
    Step(
        "the server executes it",
        "and responds",
        ("executed once, and not", "repeated"),
        ("!executed twice, with the", "!same idempotency-key"),
    ),
    Step("the result is stored", "leaves the queue"),
)

WIDTH, MARGIN = 592, 12
BOX_WIDTH, BOX_HEIGHT, GAP = 190, 44, 46
LEFT = MARGIN + 26
COLUMNS = (LEFT + BOX_WIDTH - 8, LEFT + BOX_WIDTH + 180)
TOP = 40

TITLE = "A call of failback, and what becomes of it if the process dies"
STYLE = """
.name { font-size: 13px; font-weight: 600 }
.small { font-size: 12px; fill: #59636e }
.lost { font-size: 12px; fill: #d1242f }
.box { fill: #f6f8fa; stroke: #8c959f }
.crash { stroke: #d1242f; stroke-dasharray: 4 3 }
.arrow { fill: none; stroke: #59636e; marker-end: url(#head) }
"""


def crash(step: Step, y: float) -> Iterator[str]:
    """Draw what happens if the process dies between a step, which ends at y, and the next one."""
    middle = y + GAP / 2
    yield path("crash", (MARGIN, middle), (COLUMNS[0] - 10, middle))
    for x, lines in zip(COLUMNS, (step.in_memory, step.with_journal), strict=True):
        for number, line in enumerate(lines):
            kind = "lost" if line.startswith("!") else "small"
            yield text(kind, x, middle - 3 + 16 * number, line.removeprefix("!"))


def draw() -> str:
    """Return the picture as SVG."""
    parts = [
        text("lost", MARGIN, 22, "if the process dies here"),
        text("name", COLUMNS[0], 22, "queue in memory"),
        text("name", COLUMNS[1], 22, "with a journal"),
    ]
    middle = LEFT + 30
    y = float(TOP)
    for number, step in enumerate(STEPS):
        parts += [
            box("box", LEFT, y, BOX_WIDTH, BOX_HEIGHT),
            text("name", LEFT + 8, y + 18, step.name),
            text("small", LEFT + 8, y + 35, step.below),
        ]
        y += BOX_HEIGHT
        if number < len(STEPS) - 1:
            parts.append(path("arrow", (middle, y), (middle, y + GAP)))
            parts += crash(step, y)
            y += GAP
    # An attempt that fails is repeated.
    sent, stored = (TOP + n * (BOX_HEIGHT + GAP) + BOX_HEIGHT / 2 for n in (3, 5))
    parts += [
        path("arrow", (LEFT, stored), (MARGIN, stored), (MARGIN, sent), (LEFT, sent)),
        text("small", LEFT + BOX_WIDTH + 10, stored - 4, "success: done; failure: next attempt,"),
        text("small", LEFT + BOX_WIDTH + 10, stored + 12, "or dead letter if it is given up"),
    ]
    return picture(TITLE, (WIDTH, y + MARGIN), STYLE, parts, is_narrow=True)


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
