"""A drawing as SVG text, in the colours of whatever page holds it, and the frames that most drawings are made of.

Text and lines take `currentColor`; only owners have colours of their own, which stand out on white and on black. A
drawing alone in a file carries its style with it; on a page the site's own rules take its place.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

HUES = ("#4477aa", "#c2185b", "#228833", "#8d6e00", "#aa3377", "#00796b", "#5e35b1", "#bf360c")
STYLE = (
    "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"
    "text{font-family:system-ui,sans-serif;fill:currentColor}.title{font-size:15px;font-weight:600}"
    ".note,.label{font-size:12px}.small{font-size:11px}.cell{font-size:11px;fill:#fff;text-anchor:middle;font-weight:600}"
    ".ink{font-size:11px;text-anchor:middle}.mid{text-anchor:middle}.end{text-anchor:end}"
    ".track{fill:currentColor;opacity:.08}.line{stroke:currentColor;fill:none}.faint{stroke:currentColor;fill:none;"
    "opacity:.3}</style>"
)


def hue(name: str) -> str:
    """The colour of an owner: A is always blue, B always red, and so on."""
    return HUES[(ord(name[0]) - ord("A")) % len(HUES)]


class Drawing:
    """Shapes in the order they are drawn; numbers are pixels."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "note") -> None:
        """Words whose baseline begins at (x, y), or is centred there (`ink`, `cell`, `mid`)."""
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{html.escape(words)}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        edge: float = 0,
        faint: bool = False,
    ) -> None:
        """A rectangle: filled, or with an edge in the colour of the text."""
        stroke = f' stroke="currentColor" stroke-width="{edge:g}"' if edge else ""
        opacity = ' opacity="0.35"' if faint else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{stroke}{opacity}/>'
        )

    def track(self, x: float, y: float, width: float, height: float) -> None:
        """A pale rectangle: a place that nobody is in."""
        self._parts.append(f'<rect class="track" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>')

    def line(
        self,
        points: Iterable[tuple[float, float]],
        kind: str = "line",
        width: float = 1.5,
        dash: str = "",
        stroke: str = "",
    ) -> None:
        """A line through points, in the colour of the text or in `stroke`; `dash` as SVG has it."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        colour = f' style="stroke:{stroke}"' if stroke else ""
        self._parts.append(f'<polyline class="{kind}" points="{path}" stroke-width="{width:g}"{dashed}{colour}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a head at its second end; straight up, down or sideways."""
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        self.line([(x1, y1), (x2, y2)])
        wings = [(x2 - 5 * dx - 4 * dy, y2 - 5 * dy - 4 * dx), (x2, y2), (x2 - 5 * dx + 4 * dy, y2 - 5 * dy + 4 * dx)]
        self.line(wings)

    def svg(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{html.escape(self.label)}">'
        )
        return "\n".join([head + STYLE, *self._parts, "</svg>"]) + "\n"
