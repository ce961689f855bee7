"""Gates on what a cache is about to be given: every token continues its own row's history.

Gates: this file. Proof: tests/test_cache.py. Story: cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gates.core import FULL, gate, require, require_rows


@gate("cache.positions_follow", at=FULL)
def check_positions_follow(
    *,
    positions: Tensor,  # [N, T]
    seq_lens: Sequence[int],  # N: real tokens held before this step
    valid: Tensor | None = None,  # [N, T] bool, None when every column is real
) -> None:
    """Real token i of row r in this step stands at absolute position seq_lens[r] + i; pad columns may say anything.

    A row that counts the batch's columns instead of its own tokens still reads fluent, and is rotated wrong.
    """
    require(
        len(seq_lens) == positions.shape[0], f"{positions.shape[0]} rows of positions, {len(seq_lens)} in the cache"
    )
    real = [[True] * positions.shape[1]] * len(seq_lens) if valid is None else valid.tolist()
    for row, (stated, keep, held) in enumerate(zip(positions.tolist(), real, seq_lens, strict=True)):
        got = [position for position, is_real in zip(stated, keep, strict=True) if is_real]
        wanted = list(range(held, held + len(got)))
        if got != wanted:
            token = next(i for i in range(len(got)) if got[i] != wanted[i])
            fact = (
                f"token {token} of this step is at position {got[token]}, {held} tokens held put it at {wanted[token]}"
            )
            require_rows([row], len(seq_lens), fact)
