"""Gates on blocks: nothing is lost, nothing is owned twice, every token has a place, a batch moves whole or not at all.

All but the last two take host integers, so they run in a server too. The last two read the addressing that a
decode step is about to use: an index that torch would wrap is refused before it reads a stranger's token.

Gates: this file. Proof: tests/test_reference_blocks.py, tests/test_blocks.py. Story: blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from torch import Tensor

from gates.core import FULL, gate, require, require_rows


@gate("blocks.conserved")
def check_blocks_conserved(*, free: int, owned: int, total: int) -> None:
    """Free and owned blocks together are the pool; a gap is a leak, a surplus is a block freed while owned."""
    require(free >= 0 and owned >= 0, f"{free} free, {owned} owned: neither may be negative")
    require(free + owned == total, f"{free} free + {owned} owned = {free + owned} blocks, the pool has {total}")


@gate("blocks.sink_outside")
def check_sink_outside(*, sink_slot: int, num_blocks: int, block_size: int, pool_slots: int) -> None:
    """The sink is a slot of the pool, and of no block: padding has a place to write that nobody can be given."""
    last = num_blocks * block_size - 1
    require(
        last < sink_slot < pool_slots,
        f"the sink is slot {sink_slot}, blocks name 0..{last}, the pool has {pool_slots} slots",
    )


@gate("blocks.owned_once")
def check_owned_once(
    *,
    tables: Mapping[int, Sequence[int]] | Mapping[str, Sequence[int]],
    num_blocks: int,
    shared: Container[int] = (),
) -> None:
    """No block stands in two tables, nor twice in one, and every id names a block of the pool (0..num_blocks-1).

    Published blocks (`shared`) may stand in several tables, at one and the same place: they hold the same prefix.
    """
    owner: dict[int, tuple[int | str, int]] = {}
    for name, blocks in tables.items():
        for place, block in enumerate(blocks):
            require(0 <= block < num_blocks, f"table {name} holds block {block}, the pool has 0..{num_blocks - 1}")
            other, elsewhere = owner.setdefault(block, (name, place))
            if (other, elsewhere) == (name, place):
                continue
            both = f"block {block} is in table {name} and in table {other}"
            require(other != name and block in shared, both)
            require(place == elsewhere, f"{both}, at places {place} and {elsewhere}: not the same prefix")


@gate("blocks.holders", at=FULL)
def check_holders_counted(
    *, tables: Mapping[int, Sequence[int]] | Mapping[str, Sequence[int]], holders: Sequence[int]
) -> None:
    """Each block has as many holders as tables it stands in: a count too low frees it under somebody, one too high
    never frees it."""
    counted = Counter(block for blocks in tables.values() for block in blocks)
    bad = [block for block, count in enumerate(holders) if count != counted[block]]
    if bad:
        block = bad[0]
        require(False, f"block {block} counts {holders[block]} holders, {counted[block]} tables hold it [{len(bad)}]")


@gate("blocks.tables_cover")
def check_tables_cover(
    *, lengths: Sequence[int], blocks_held: Sequence[int], block_size: int, known: Sequence[int] | None = None
) -> None:
    """Each table's blocks hold its tokens, and it keeps at most one block (reserved for the next token) beyond them.

    `known` are the tokens that each table is to hold once its prompt is computed, which has its blocks from the start.
    """
    require(len(lengths) == len(blocks_held), f"{len(lengths)} lengths for {len(blocks_held)} tables")
    needed = [-(-length // block_size) for length in lengths]
    short = [row for row, (held, need) in enumerate(zip(blocks_held, needed, strict=True)) if held < need]
    if short:
        row = short[0]
        fact = f"{blocks_held[row]} blocks of {block_size} hold {blocks_held[row] * block_size} tokens"
        require_rows(short, len(lengths), f"{fact}, the table counts {lengths[row]}")
    most = needed if known is None else [max(need, -(-k // block_size)) for need, k in zip(needed, known, strict=True)]
    hoards = [row for row, (held, need) in enumerate(zip(blocks_held, most, strict=True)) if held > need + 1]
    if hoards:
        row = hoards[0]
        tokens = lengths[row] if known is None else max(lengths[row], known[row])
        fact = f"{blocks_held[row]} blocks held, {tokens} tokens need {most[row]} and one may be reserved"
        require_rows(hoards, len(lengths), fact)


@gate("blocks.batch_reserved")
def check_batch_reserved(*, demand: int, free: int) -> None:
    """The whole batch's block demand fits before any row moves: all-or-nothing per row is not atomic per batch."""
    require(demand <= free, f"the batch needs {demand} more blocks, {free} are free; no row may grow")


@gate("blocks.mapping_in_pool", at=FULL)
def check_mapping_in_pool(*, slot_mapping: Tensor, num_slots: int) -> None:
    """Every entry of the rectangle [R, W], padding included, is a slot of the pool.

    Padding is dereferenced and masked afterwards, and torch wraps -1 onto the last slot, so a negative pad
    reads a live token and the mask hides it. The writer of the rectangle is the side to fix.
    """
    outside = ((slot_mapping < 0) | (slot_mapping >= num_slots)).nonzero().tolist()
    if outside:
        row, column = outside[0]
        fact = f"column {column} addresses slot {int(slot_mapping[row, column])}, the pool has 0..{num_slots - 1}"
        require_rows(sorted({r for r, _ in outside}), slot_mapping.shape[0], fact)


@gate("blocks.mapping_follows_tables", at=FULL)
def check_mapping_follows_tables(
    *,
    slot_mapping: Tensor,  # [R, W]
    context_lens: Tensor,  # [R]
    tables: Sequence[Sequence[int]],
    block_size: int,
) -> None:
    """The first `context_lens[r]` entries of row r are its own table's slots, in order, recomputed here."""
    lengths = context_lens.tolist()
    rows = slot_mapping.tolist()
    require(len(rows) == len(lengths) == len(tables), f"{len(rows)} rows, {len(lengths)} lengths, {len(tables)} tables")
    for row, (length, blocks) in enumerate(zip(lengths, tables, strict=True)):
        held = len(blocks) * block_size
        require(0 < length <= held, f"row {row} reads {length} tokens, its {len(blocks)} blocks hold {held}")
        wanted = [blocks[t // block_size] * block_size + t % block_size for t in range(length)]
        got = rows[row][:length]
        if got != wanted:
            token = next((t for t in range(len(got)) if got[t] != wanted[t]), len(got))
            have = got[token] if token < len(got) else "nothing"
            require_rows([row], len(rows), f"token {token} is read from slot {have}, written to {wanted[token]}")
