"""`python -m tests.museum [ROOM ...]`: the catalogue as Markdown, made by running every exhibit at every level."""

from __future__ import annotations

import argparse

import torch

from tests.museum.catalogue import ROOMS, render, rows_of, summary


def main() -> None:
    """Print one section a room, and the sums."""
    parser = argparse.ArgumentParser(prog="python -m tests.museum", description=(__doc__ or "").split(": ")[1])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"any of {', '.join(ROOMS)}; default: all")
    rooms = parser.parse_args().rooms or list(ROOMS)
    if unknown := [room for room in rooms if room not in ROOMS]:
        parser.error(f"ROOM: {unknown[0]!r} is not one of {', '.join(ROOMS)}")
    torch.set_num_threads(1)
    tables = {room: rows_of(ROOMS[room]) for room in rooms}
    for room, table in tables.items():
        print(render(room, table) + "\n")
    print(summary([row for table in tables.values() for row in table]))


if __name__ == "__main__":
    main()
