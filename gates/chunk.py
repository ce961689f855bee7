"""Gates on chunked prefill: the budget of a step is kept and shared, and a chunk goes on where the last one ended.

All but the last take host integers that a step has anyway. Together they bound a wait: every step gives the earliest
prompt half of what the decoding rows leave, and the shortest one the other half.

Proof: tests/test_chunk.py. Story: chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from gates.core import CHEAP, FULL, gate, require, require_rows


@gate("chunk.budget", at=CHEAP)
def check_budget_kept(*, decode_rows: int, chunks: Sequence[int], budget: int) -> None:
    """One token for each decoding row and the chunks' tokens are at most the step's budget: nobody waits for more."""
    total = decode_rows + sum(chunks)
    require(
        total <= budget,
        f"{decode_rows} rows decode and {len(chunks)} chunks compute {sum(chunks):,} tokens, the budget is {budget:,}",
    )


@gate("chunk.shared", at=CHEAP)
def check_chunks_shared(
    *, pending: Sequence[int], counts: Sequence[int], budget: int, behind: Sequence[int] | None = None
) -> None:
    """Of `budget` tokens the first in line and the shortest get half each, and none is left that somebody could use.

    `pending` are the tokens each prompt still has to compute, in order of arrival; `counts` is what each was given.
    Prompt i waits for `behind[i]` to compute a block of both (itself: for nobody); that one then has its half.
    """
    if not pending:
        return
    lost = [index for index, tokens in enumerate(pending) if tokens < 1]
    require_rows(lost, len(pending), f"a row has {min(pending)} tokens to compute; one that was sampled is lost")
    over = [index for index, (count, most) in enumerate(zip(counts, pending, strict=True)) if not 0 <= count <= most]
    require_rows(over, len(pending), f"given {list(counts)} of {list(pending)} pending tokens")
    leaders = list(range(len(pending))) if behind is None else behind
    lent = [index for index, leader in enumerate(leaders) if leader != index and (counts[index] or leader > index)]
    require_rows(lent, len(pending), f"given {list(counts)}, while they wait for {list(leaders)}")
    usable = min(budget, sum(tokens for index, tokens in enumerate(pending) if leaders[index] == index))
    require(sum(counts) == usable, f"{sum(counts):,} tokens of a budget of {budget:,} are given, {usable:,} can be")
    tokens, shortest = min(zip(pending, leaders, strict=True))
    who = "shortest prompt" if tokens == pending[shortest] else f"prompt that one of {tokens:,} tokens waits for"
    for whose, index, half in (("first prompt", 0, budget - budget // 2), (who, shortest, budget // 2)):
        least = min(pending[index], half)
        fact = f"the {whose} is given {counts[index]:,} of {pending[index]:,} tokens, at least {least:,} are its"
        require(counts[index] >= least, fact)


@gate("chunk.continues", at=CHEAP)
def check_chunks_continue(
    *,
    rows: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    stored: Sequence[int],
    mirrored: Sequence[int],
) -> None:
    """Each chunk begins at the number of tokens computed before it, so a token's position is its place in line.

    `starts` and `counts` are the chunks' own; `stored` (the block tables) and `mirrored` (the slot table) are counted
    after the chunks' tokens were added, and lean on neither.
    """
    for row, start, count, held, seen in zip(rows, starts, counts, stored, mirrored, strict=True):
        require(count > 0, f"row {row} has a chunk of {count} tokens")
        fact = f"row {row} computes tokens {start}..{start + count - 1}"
        require(start + count == held, f"{fact}, its block table holds {held} with them")
        require(start + count == seen, f"{fact}, the slot table mirrors {seen} with them")


@gate("chunk.slots", at=FULL)
def check_chunk_slots(
    *, rows: Sequence[int], slots: Sequence[Sequence[int]], tables: Sequence[Sequence[int]], block_size: int
) -> None:
    """The slots a chunk reads and writes are its own block table's, in order, recomputed here."""
    for row, given, blocks in zip(rows, slots, tables, strict=True):
        room = len(blocks) * block_size
        require(len(given) <= room, f"row {row} addresses {len(given)} tokens, its {len(blocks)} blocks hold {room}")
        wanted = [blocks[t // block_size] * block_size + t % block_size for t in range(len(given))]
        bad = [token for token, (got, slot) in enumerate(zip(given, wanted, strict=True)) if got != slot]
        if bad:
            fact = f"token {bad[0]} is addressed in slot {given[bad[0]]}, its block table says {wanted[bad[0]]}"
            require_rows([row], len(rows), fact)
