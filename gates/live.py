"""What must hold of a live picture's viewers: what is kept for one is a few frames, however slowly it reads.

A stream that is written faster than it is read grows somewhere: in a queue, in the socket's buffer, in the engine's
patience. Who bounds none of the three has let one sleeping browser tab into the memory of the server.

Proof: tests/test_live.py. Story: live.
"""

from __future__ import annotations

from collections.abc import Iterable

from gates.core import CHEAP, gate, require


@gate("live.viewers_bounded", at=CHEAP)
def check_viewers_bounded(*, waiting: Iterable[int], most: int) -> None:
    """After a frame was offered: no viewer has more than `most` frames offered and not yet sent."""
    for index, frames in enumerate(waiting):
        require(frames <= most, f"{frames} frames wait for viewer {index}, at most {most} are kept")
