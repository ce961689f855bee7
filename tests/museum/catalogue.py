"""All exhibits, room by room, and the table that tells who notices each of them."""

from __future__ import annotations

from collections import Counter

from tests.museum import draws, graphs, overlap, padding, prefixes, queue, rows, steps
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Exhibit, visit

ROOMS: dict[str, tuple[Exhibit, ...]] = {
    "padding": padding.EXHIBITS,
    "rows": rows.EXHIBITS,
    "steps": steps.EXHIBITS,
    "graphs": graphs.EXHIBITS,
    "queue": queue.EXHIBITS,
    "overlap": overlap.EXHIBITS,
    "prefixes": prefixes.EXHIBITS,
    "draws": draws.EXHIBITS,
}
EXHIBITS = tuple(exhibit for room in ROOMS.values() for exhibit in room)
HEADER = ("exhibit", "thread", "full", "server (cheap)", "without gates", "message")


def rows_of(room: tuple[Exhibit, ...]) -> list[tuple[str, ...]]:
    """The table of a room, one row an exhibit, by running each of them."""
    table = []
    for exhibit in room:
        full, cheap, off = (visit(exhibit, level) for level in ("full", "cheap", "off"))
        table.append((exhibit.name, exhibit.thread, full.by, cheap.by, off.by, full.message))
    return table


def render(room: str, table: list[tuple[str, ...]]) -> str:
    """A room as a Markdown section: the table, then each exhibit's sentence and its lines."""
    lines = [f"## {room}", "", "| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    for exhibit in ROOMS[room]:
        lines += ["", f"**{exhibit.name}** ({exhibit.thread}). {exhibit.story}", "", "```diff"]
        for edit in exhibit.edits:
            lines += [f"# {edit.place}"]
            lines += ["-" + line for line in edit.old.split("\n")] + ["+" + line for line in edit.new.split("\n")]
        lines += ["```"]
    return "\n".join(lines)


def summary(table: list[tuple[str, ...]]) -> str:
    """How many exhibits each level of the gates stops before a client sees them."""
    kinds = {LOCKSTEP: "only by tokens", HARMLESS: "by nothing"}
    lines = [f"{len(table)} exhibits."]
    for column, level in ((2, "full"), (3, "cheap"), (4, "off")):
        counts = Counter(kinds.get(row[column], "a gate" if "." in row[column] else "an error") for row in table)
        told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        lines.append(f"Gates {level}: {told}.")
    return "\n".join(lines)
