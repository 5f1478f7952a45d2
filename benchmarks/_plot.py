"""Draws figures as SVG: lines over time, and bars of a table. All pages of benchmarks use it.

A picture is small (3 to 6 KB), the same each time for the same figures, so that a test can compare
it with its table, and readable on light and dark pages: colors are variables of CSS, whose values
follow `prefers-color-scheme`. Text is text, not outlines. matplotlib was tried: five times as
large, with fixed colors in each element, and different bytes from one version to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

WIDTH, HEIGHT = 860, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 80, 44
"""The frame of a `Chart`."""

STYLE = """\
:root { --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --rule: #d1d9e0; --load: #e4e8ec;
  --red: #cf222e; --amber: #9a6700; --blue: #0969da; --violet: #8250df; --gray: #8c959f }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #f0f6fc; --soft: #9198a1; --rule: #3d444d; --load: #262c36;
    --red: #f85149; --amber: #d29922; --blue: #58a6ff; --violet: #bc8cff; --gray: #656c76 }
}
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: var(--soft) }
.title { font-size: 14px; font-weight: 600; fill: var(--ink) }
.middle { text-anchor: middle } .end { text-anchor: end } .own { fill: var(--ink) }
path { fill: none; stroke-width: 2; stroke-linejoin: round }
.load { fill: var(--load) } .rule { stroke: var(--rule); stroke-width: 1 }
.capacity { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 6 4 }
.bare, .naive { stroke: var(--red) }
.fixed, .throttle { stroke: var(--amber); stroke-dasharray: 9 3 }
.adaptive, .breaker { stroke: var(--blue); stroke-width: 3 } .severed { stroke: var(--violet) }
.ours { fill: var(--blue) } .theirs { fill: var(--gray) }"""

Points = Sequence[tuple[float, float]]


def svg(title: str, height: int, parts: Iterable[str]) -> str:
    """A picture with its title, as wide as all others."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}\n</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="var(--paper)"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, style: str = "") -> str:
    """A line of text."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


# Lines


class Chart:
    """A chart with two axes. Points above the top are drawn at the top."""

    def __init__(self, title: str, x: tuple[float, float], top: float) -> None:
        self._title = title
        self._from_x, self._to_x = x
        self._top = top
        self._parts = [f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>']

    def area(self, points: Points) -> None:
        """The area under a line, as a load."""
        ends = [(points[0][0], 0.0), *points, (points[-1][0], 0.0)]
        self._path("load", ends)

    def line(self, points: Points, style: str) -> None:
        """A line."""
        self._path(style, points)

    def phase(self, x: float, begins: float, name: str) -> None:
        """A name above the chart, and a rule where it begins."""
        self._path("rule", [(begins, 0.0), (begins, self._top)])
        self._text(self._x(x), TOP - 8, name, "middle")

    def axes(self, x: Iterable[tuple[float, str]], y: Iterable[float], x_name: str) -> None:
        """The labels of both axes; calls a second, or shares, are on the left."""
        for value in y:
            self._path("rule", [(self._from_x, value), (self._to_x, value)])
            self._text(LEFT - 8, self._y(value) + 4, f"{value:g}", "end")
        for value, label in x:
            self._text(self._x(value), HEIGHT - BOTTOM + 16, label, "middle")
        self._text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name, "middle")

    def legend(self, subjects: Iterable[tuple[str, str]]) -> None:
        """The styles and names of what is drawn, below the title."""
        drawn = [("load", "offered load"), ("capacity", "capacity"), *subjects]
        for number, (style, label) in enumerate(drawn):
            x = LEFT + 150 * number
            shape = "v-9h26v9z" if style == "load" else "m0,-4h26"
            self._parts.append(f'<path class="{style}" d="M{x},45{shape}"/>')
            self._text(x + 32, 45, label)

    def svg(self) -> str:
        """The chart."""
        return svg(self._title, HEIGHT, self._parts)

    def _path(self, style: str, points: Points) -> None:
        places = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        self._parts.append(f'<path class="{style}" d="M{places}"/>')

    def _text(self, x: float, y: float, words: str, style: str = "") -> None:
        self._parts.append(text(x, y, words, style))

    def _x(self, x: float) -> float:
        share = (x - self._from_x) / (self._to_x - self._from_x)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def _y(self, y: float) -> float:
        return HEIGHT - BOTTOM - min(y / self._top, 1.0) * (HEIGHT - TOP - BOTTOM)


# Bars

ROW, BAR = 22, 14
FIRST_ROW = 66
GAP, LABEL = 24, 64
"""Between two panels, and for the figure after the longest bar."""
CHARACTER = 7.0
"""The width of one, about; names are never cut."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A column of a table, as bars."""

    name: str
    values: Sequence[float | None]
    labels: Sequence[str]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """The length of a bar, of the longest one; of a logarithmic one at least a tenth."""
        known = [each for each in self.values if each is not None and each > 0]
        if not known or value <= 0:
            return 0.0
        if not self.logarithmic:
            return value / max(known)
        lowest, highest = log10(min(known)), log10(max(known))
        return 0.1 + 0.9 * (log10(value) - lowest) / ((highest - lowest) or 1.0)


def bars(title: str, names: Sequence[str], own: Sequence[bool], panels: Sequence[Panel]) -> str:
    """Rows with a bar in each panel; those of rpcwheel (`own`) have another color."""
    begins = 16 + CHARACTER * max(map(len, names))
    width = (WIDTH - RIGHT - begins - GAP * (len(panels) - 1)) / len(panels)
    height = FIRST_ROW + ROW * len(names)
    parts = [
        f'<text class="title" x="8" y="20">{escape(title)}</text>',
        f'<rect class="ours" x="{WIDTH - 88}" y="10" width="{BAR}" height="{BAR}"/>',
        text(WIDTH - 68, 21, "rpcwheel"),
    ]
    for row, (name, is_own) in enumerate(zip(names, own, strict=True)):
        style = "own" if is_own else ""
        parts.append(text(begins - 8, FIRST_ROW + ROW * row + 11, name, f"end {style}".strip()))
    for number, panel in enumerate(panels):
        x = begins + number * (width + GAP)
        scale = " (logarithmic)" if panel.logarithmic else ""
        parts.append(text(x, 50, panel.name + scale))
        for row, (value, label) in enumerate(zip(panel.values, panel.labels, strict=True)):
            y = FIRST_ROW + ROW * row
            length = 0.0 if value is None else panel.share(value) * (width - LABEL)
            if value is not None:
                kind = "ours" if own[row] else "theirs"
                parts.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(length, 1.0):.1f}" '
                    f'height="{BAR}"/>'
                )
            parts.append(text(x + length + 6, y + 11, label, "own" if own[row] else ""))
    return svg(title, height, parts)
