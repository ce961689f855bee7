"""`python -m tests.museum`: the catalogue as Markdown, made by running every exhibit at every level."""

from __future__ import annotations

import torch

from tests.museum.catalogue import ROOMS, render, rows_of, summary


def main() -> None:
    """Print one section a room, and the sums."""
    torch.set_num_threads(1)
    tables = {room: rows_of(exhibits) for room, exhibits in ROOMS.items()}
    for room, table in tables.items():
        print(render(room, table) + "\n")
    print(summary([row for table in tables.values() for row in table]))


if __name__ == "__main__":
    main()
