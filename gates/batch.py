"""Gates on a static batch: when a padded prefill may land, and what a finished row goes on costing.

Gates: this file. Proof: tests/test_batch.py, tests/test_reference_blocks.py. Story: batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from gates.core import gate, require, require_rows


@gate("batch.prefill_lands_empty")
def check_prefill_lands_empty(*, seq_lens: Sequence[int]) -> None:
    """A forward that carries a mask attends to its own tokens only, so no row may hold a history it would ignore.

    To be asked on layer 0: it grows the tables, so on any later layer every good prefill looks like a second one.
    """
    held = [row for row, length in enumerate(seq_lens) if length]
    if held:
        fact = f"a masked prefill sees 0 earlier tokens, the cache holds {seq_lens[held[0]]} (asked past layer 0?)"
        require_rows(held, len(seq_lens), fact)


@gate("batch.rows_in_step")
def check_rows_in_step(*, prompt_lens: Sequence[int], decode_steps: int, seq_lens: Sequence[int]) -> None:
    """In a static batch every row, finished or not, holds its prompt and one token for each decode step so far."""
    require(len(prompt_lens) == len(seq_lens), f"{len(prompt_lens)} prompts, {len(seq_lens)} rows in the cache")
    wanted = [prompt + decode_steps for prompt in prompt_lens]
    off = [row for row, length in enumerate(seq_lens) if length != wanted[row]]
    if off:
        row = off[0]
        fact = f"{seq_lens[row]} tokens held, {prompt_lens[row]} of prompt + {decode_steps} steps = {wanted[row]}"
        require_rows(off, len(seq_lens), fact)
