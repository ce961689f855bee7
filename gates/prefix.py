"""Gates on the prefix cache: what is taken is what was asked for, computed whole, and written by nobody afterwards.

All but the last take host integers. The last reads two copies of one block's K/V, where a sequence has computed again
what another had published: a hit must be a recompute, bit for bit, or the cache changes answers.

Proof: tests/test_prefix.py. Story: prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gates.core import CHEAP, FULL, gate, require, require_rows


@gate("prefix.hit", at=CHEAP)
def check_hit_verified(
    *,
    tokens: Sequence[int],
    salt: str,
    held: Sequence[tuple[int, ...]],
    salts: Sequence[str],
    linked: Sequence[bool],
    published: Sequence[bool],
) -> None:
    """Each block of a hit is published, and holds this request's own tokens, under its salt, behind the one before it.

    `tokens` begin with the first block of the hit.
    """
    at = 0
    for index, (ids, theirs, follows, known) in enumerate(zip(held, salts, linked, published, strict=True)):
        require(known, f"block {index} of a hit was given up since it was found; its next owner may be writing it")
        wanted = tuple(tokens[at : at + len(ids)])
        require(ids == wanted, f"block {index} of a hit holds tokens {list(ids)}, the request has {list(wanted)}")
        require(theirs == salt, f"block {index} of a hit has salt {theirs!r}, the request {salt!r}")
        require(follows, f"block {index} of a hit stands behind another prefix than the {index} blocks before it")
        at += len(ids)


@gate("prefix.last", at=CHEAP)
def check_last_recomputed(*, cached: int, tokens: int) -> None:
    """At least the last token is computed: its logits are what the next one is chosen from."""
    require(cached < tokens, f"{cached} of {tokens} tokens are taken from the cache, 0 are left to compute")


@gate("prefix.published", at=CHEAP)
def check_published_computed(
    *, stop: int, computed: int, before: Sequence[int] = (), parent: Sequence[int] = ()
) -> None:
    """A block that is published has its K/V: its tokens, up to `stop`, are computed, behind the block it is linked to.

    `before` are the sequence's own tokens of the block before it, `parent` those that the published one there holds.
    """
    require(stop <= computed, f"a block of tokens up to {stop} is published, {computed} are computed")
    fact = f"a block of tokens up to {stop} is published behind {list(parent)}, it was computed behind {list(before)}"
    require(tuple(before) == tuple(parent), fact)


@gate("prefix.private", at=CHEAP)
def check_writes_private(
    *, rows: Sequence[int], blocks: Sequence[int], holders: Sequence[int], published: Sequence[bool]
) -> None:
    """What a step is about to write is one row's own: its block has one holder and is not published."""
    for row, block, count, known in zip(rows, blocks, holders, published, strict=True):
        require(count == 1, f"row {row} writes into block {block}, which {count} rows hold")
        require(not known, f"row {row} writes into block {block}, which is published")


@gate("prefix.computed_once", at=CHEAP)
def check_computed_once(
    *, rows: Sequence[int], computed: Sequence[int], cached: Sequence[int], stored: Sequence[int]
) -> None:
    """Since it was admitted, a row has computed each of its tokens once, but for those it found in the cache."""
    bad = [at for at, (ours, hit, all_) in enumerate(zip(computed, cached, stored, strict=True)) if ours + hit != all_]
    if bad:
        at = bad[0]
        fact = f"row {rows[at]} computed {computed[at]} tokens and found {cached[at]}, it stores {stored[at]}"
        require_rows([rows[index] for index in bad], len(rows), fact)


@gate("prefix.recompute", at=FULL)
def check_hit_equals_recompute(
    *,
    published: Tensor,  # [2L, S, K, D]
    computed: Tensor,  # [2L, S, K, D]
    block: int,
) -> None:
    """A published block and a later computation of the same tokens at the same place are the same bits."""
    differ = int((published != computed).sum())
    require(differ == 0, f"block {block} differs in {differ} of {computed.numel()} numbers from what is computed again")
    require(torch.equal(published, computed), f"block {block} holds a NaN, and so does what is computed again")
