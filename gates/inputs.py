"""What must hold of the persistent inputs: they never move, and nothing stale stands behind the live rows.

Proof: tests/test_inputs.py. Story: inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gates.core import CHEAP, FULL, gate, require


@gate("inputs.addresses", at=CHEAP)
def check_addresses_stable(*, recorded: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Each named buffer is where it was when a recording was bound to it."""
    require(recorded.keys() == now.keys(), f"buffers were {sorted(recorded)}, are now {sorted(now)}")
    moved = [name for name in recorded if recorded[name] != now[name]]
    if moved:
        name = moved[0]
        require(
            False,
            f"{name} was at {recorded[name]:#x} and is now at {now[name]:#x}; a recording made before reads storage "
            f"that no step writes (write in place) [{len(moved)} of {len(recorded)} buffers]",
        )


@gate("inputs.tail", at=FULL)
def check_tail_neutral(*, buffers: Mapping[str, Tensor], neutral: Mapping[str, int], rows: int) -> None:
    """Everything at or behind line `rows` of each [max_batch_size] buffer is that buffer's neutral value.

    A padded row that kept the write slot of a larger batch before it would store K/V in a block that has a new owner.
    """
    for name, buffer in buffers.items():
        stale = [line for line, value in enumerate(buffer.tolist()) if line >= rows and value != neutral[name]]
        if stale:
            line = stale[0]
            require(
                False,
                f"{name} line {line} is {int(buffer[line])}, behind {rows} live rows it is to be {neutral[name]} "
                f"[{len(stale)} stale lines]",
            )
