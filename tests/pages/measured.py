"""The tables of docs/measurements.md as numbers, so that a drawing of a measurement cannot differ from its table.

Standard library only. What is measured is written there by hand, with its machine and command; nothing is kept twice.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "measurements.md"
NUMBER = re.compile(r"-?[\d,]+(?:\.\d+)?")


def table(after: str) -> list[list[str]]:
    """The cells of the first table behind the line `after`, its heads first.

    Raises:
        LookupError: the page has no such line, or no table behind it.
    """
    lines = PAGE.read_text("utf-8").split("\n")
    if after not in lines:
        raise LookupError(f"{PAGE.name}: no line is {after!r}")
    rows: list[list[str]] = []
    for line in lines[lines.index(after) + 1 :]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows or line.startswith("#"):
            break
    if not rows:
        raise LookupError(f"{PAGE.name}: no table stands behind {after!r}")
    return [row for row in rows if not set("".join(row)) <= set("-: ")]


def number(cell: str) -> float:
    """The first number of a cell: `1,091 (0.99)` is 1091."""
    found = NUMBER.match(cell)
    if found is None:
        raise ValueError(f"{cell!r} begins with no number")
    return float(found[0].replace(",", ""))
