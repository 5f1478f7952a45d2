"""Draws which component notices which fault: `python docs/images/faults.py` writes `faults.svg`.

tests/contract/test_documents.py fails if the picture is out of date. It is narrow, so that its text
can be read on a phone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from _svg import GRAY, box, path, picture, text

PICTURE = Path(__file__).with_name("faults.svg")


class Row(NamedTuple):
    """A component, the fault that it notices, and what it does then."""

    component: str
    fault: str
    action: str


CLIENT: Final = (
    Row("journal", "the process dies", "another one delivers what was queued"),
    Row("failback", "the server is down for minutes", "answers now, and delivers later"),
    Row("deadline", "no answer in time", "ends all attempts of the call"),
    Row("retry", "an attempt fails", "makes another one, if it is safe"),
    Row("circuit breaker", "nearly all attempts fail", "refuses them in the client"),
    Row("balancer", "one server of several fails", "ejects it; the others get the calls"),
    Row("known instances", "the registry is down or empty", "keeps those that answer"),
    Row("heartbeat", "the connection is silent", "replaces it"),
)
SERVER: Final = (
    Row("idle detector", "a connection is not used", "closes it"),
    Row("limit", "more calls than it can finish", "refuses the least critical ones"),
    Row("graceful stop", "SIGTERM, such as a release", "withdraws, then finishes its calls"),
    Row("publisher", "the registry has lost it", "registers it again"),
)

WIDTH, MARGIN = 560, 12
LEFT = MARGIN + 12
BOX_WIDTH, BOX_HEIGHT, STEP = 146, 28, 40
TITLE_HEIGHT, LINK = 30, 84

TITLE = "Which component notices which fault, on the path from the caller to the server"
STYLE = """
.name { font-size: 13px; font-weight: 600 }
.small { font-size: 12px; fill: #59636e }
.fault { font-size: 12px; fill: #d1242f }
.box { fill: #ddf4ff; stroke: #54aeff }
.place { fill: #f6f8fa; stroke: #8c959f }
.arrow { fill: none; stroke: #59636e; marker-start: url(#tail); marker-end: url(#head) }
"""


def arrow(x: float, top: float, bottom: float) -> str:
    """Return a vertical arrow with two heads."""
    return path("arrow", (x, top), (x, bottom))


def place(title: str, rows: tuple[Row, ...], y: float) -> Iterator[str]:
    """Draw a process with its components."""
    yield box("place", MARGIN, y, WIDTH - 2 * MARGIN, height_of(rows), 6)
    yield text("name", LEFT, y + 20, title)
    for number, row in enumerate(rows):
        top = y + TITLE_HEIGHT + number * STEP
        yield box("box", LEFT, top, BOX_WIDTH, BOX_HEIGHT)
        yield text("name", LEFT + 8, top + 19, row.component)
        yield text("fault", LEFT + BOX_WIDTH + 14, top + 11, row.fault)
        yield text("small", LEFT + BOX_WIDTH + 14, top + 27, row.action)


def height_of(rows: tuple[Row, ...]) -> int:
    """Return the height of a process with these components."""
    return TITLE_HEIGHT + STEP * len(rows)


def draw() -> str:
    """Return the picture as SVG."""
    parts = [
        text("fault", MARGIN, 20, "Red: the fault."),
        text("small", MARGIN + 130, 20, "Gray: what the component that notices it does."),
    ]
    y = 32.0
    parts += place("client", CLIENT, y)
    y += height_of(CLIENT)
    middle, registry = y + LINK / 2, WIDTH - LEFT - BOX_WIDTH
    parts += [
        arrow(LEFT + BOX_WIDTH / 2, y, y + LINK),
        text("name", LEFT + BOX_WIDTH / 2 + 14, middle - 4, "connection"),
        text("small", LEFT + BOX_WIDTH / 2 + 14, middle + 12, "silent, cut, refused"),
        box("place", registry, middle - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT),
        text("name", registry + 8, middle + 5, "registry"),
        arrow(registry + BOX_WIDTH / 2, y, middle - BOX_HEIGHT / 2),
        arrow(registry + BOX_WIDTH / 2, middle + BOX_HEIGHT / 2, y + LINK),
    ]
    y += LINK
    parts += place("server", SERVER, y)
    size = WIDTH, y + height_of(SERVER) + MARGIN
    return picture(TITLE, size, STYLE, parts, heads={"head": GRAY, "tail": GRAY}, is_narrow=True)


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
