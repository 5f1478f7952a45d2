"""What the scripts beside this one draw with: parts of a picture in SVG."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Final

GRAY, RED = "#59636e", "#d1242f"

HEAD: Final = {"head": GRAY}
"""The color of the heads of arrows, by the name of their marker."""


def text(kind: str, x: float, y: float, line: str, anchor: str = "") -> str:
    """Return a line of text."""
    anchor = anchor and f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{anchor}>{escape(line)}</text>'


def box(kind: str, x: float, y: float, width: float, height: float, radius: int = 4) -> str:
    """Return an empty box."""
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'rx="{radius}"/>'
    )


def path(kind: str, *points: tuple[float, float]) -> str:
    """Return lines from point to point."""
    steps = " ".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path class="{kind}" d="M{steps}"/>'


def picture(
    title: str,
    size: tuple[int, float],
    style: str,
    parts: Iterable[str],
    *,
    heads: Mapping[str, str] = HEAD,
    is_narrow: bool = False,
) -> str:
    """Return a picture.

    Args:
        title: Says what it shows.
        size: Width and height.
        style: The classes, in CSS.
        parts: What is drawn.
        heads: The colors of the heads of arrows; one called `tail` points back.
        is_narrow: Whether it is never shown smaller, so that its text can be read on a phone.
    """
    width, height = size[0], round(size[1])
    view_box = f'viewBox="0 0 {width} {height}"'
    fixed = f'width="{width}" height="{height}" ' if is_narrow else ""
    shapes = {"tail": ("1", "M7 0 0 3 7 6z")}
    markers = [
        f'<marker id="{name}" refX="{at}" refY="3" markerWidth="7" markerHeight="6" '
        f'orient="auto"><path d="{shape}" fill="{color}"/></marker>'
        for name, color in heads.items()
        for at, shape in [shapes.get(name, ("6", "M0 0 7 3 0 6z"))]
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {fixed}{view_box} role="img">',
        f"<title>{title}</title>",
        "<style>",
        "text { font-family: ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }",
        style.strip(),
        "</style>",
        *(["<defs>", *markers, "</defs>"] if markers else []),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *parts,
        "</svg>",
        "",
    ])  # fmt: skip
