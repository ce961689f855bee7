"""What must hold of a GPU engine: nothing is compiled once it is ready, its allocator is at rest, its tasks are whole.

A just-in-time compiler that meets an integer of another kind quietly compiles once more, for a second, in the middle
of a step; an allocator that grows waits for the device, and grows again until there is no more. A kernel checks
nothing: what no task names it leaves as it was.

Proof: tests/test_gpu.py, tests/test_gpu_tasks.py. Story: gpu.
"""

from __future__ import annotations

from collections.abc import Sequence

from gates.core import CHEAP, FULL, gate, require


@gate("gpu.nothing_compiled", at=CHEAP)
def check_nothing_compiled(*, compiles_after_ready: int) -> None:
    """No kernel variant was compiled, or loaded, in front of a waiting client."""
    require(compiles_after_ready == 0, f"{compiles_after_ready} kernel variants compiled after ready, 0 may")


@gate("gpu.allocator_at_rest", at=FULL)
def check_allocator_at_rest(*, reserved: int, at_ready: int) -> None:
    """The device's allocator holds no more bytes than it did when the engine was ready."""
    require(reserved <= at_ready, f"{reserved:,} bytes reserved on the device, {at_ready:,} when it was ready")


@gate("gpu.tasks_cover", at=CHEAP)
def check_tasks_cover(
    *,
    tasks: Sequence[Sequence[int]],  # (first token in the flat list, tokens, its position, where its table begins)
    chunks: Sequence[tuple[int, int, int]],  # (position of the first token, tokens, where its table begins)
    most: int,
) -> None:
    """Before a prefill is launched: its tasks hold each token of each chunk once, at its own position, and each fits a
    tile of `most` tokens. A token that no task holds keeps what another prefill left in the buffer."""
    index = flat = 0
    for start, tokens, base in chunks:
        done = 0
        while done < tokens:
            if index == len(tasks):
                require(False, f"{len(tasks)} tasks, and token {flat + done} is in none of them")
            first, count, position, table = tasks[index]
            at, wanted, fit = (first, position, table), (flat + done, start + done, base), min(most, tokens - done)
            if at != wanted:
                require(False, f"task {index} is (token, position, table) {at}, the next is {wanted}")
            if not 1 <= count <= fit:
                require(False, f"task {index} holds {count} tokens, 1 to {fit} are left and fit a tile")
            done, index = done + count, index + 1
        flat += tokens
    require(index == len(tasks), f"{len(tasks)} tasks, the first {index} hold all {flat} tokens")
