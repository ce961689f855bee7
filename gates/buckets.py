"""What must hold of padding: every batch has a bucket, and a padded row reads nothing and harms nothing.

Proof: tests/test_buckets.py. Story: buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gates.core import CHEAP, FULL, gate, require


@gate("buckets.pad_inert", at=FULL)
def check_pad_inert(
    *,
    context_lens: Tensor,  # [N]
    write_slots: Tensor,  # [N]
    pad_rows: int,
    sink_slot: int,
) -> None:
    """Padded rows read nothing, padded rows write to the sink, and no real row writes to the sink.

    The sink is what nobody reads, so the third clause is a lost token and the second somebody else's.
    """
    real = context_lens.shape[0] - pad_rows
    lens, writes = context_lens.tolist(), write_slots.tolist()
    reading = [line for line in range(real, len(lens)) if lens[line] != 0]
    require(not reading, _lines("padded rows have context_len 0", reading, lens))
    writing = [line for line in range(real, len(writes)) if writes[line] != sink_slot]
    require(not writing, _lines(f"padded rows write to the sink, slot {sink_slot}", writing, writes))
    lost = [line for line in range(real) if writes[line] == sink_slot]
    require(not lost, _lines(f"no real row writes to the sink, slot {sink_slot}", lost, writes))


@gate("buckets.pad_finite", at=FULL)
def check_pad_finite(*, logits: Tensor, pad_rows: int) -> None:  # logits: [N, V]
    """Padded rows give finite logits whenever the real rows do.

    Nobody reads them, until a scale, a quantised matrix product or an expert router takes a maximum over the batch.
    """
    finite = logits.isfinite().all(dim=1).tolist()
    real = len(finite) - pad_rows
    if all(finite[:real]):  # a model that gives NaN to everybody has another fault
        bad = [line for line in range(real, len(finite)) if not finite[line]]
        require(not bad, f"logits of padded rows are not finite, first at line {bad[:1]} [{len(bad)} of {pad_rows}]")


@gate("buckets.covers", at=CHEAP)
def check_bucket_covers(*, axis: str, sizes: Sequence[int], limit: int, mapped: Sequence[int]) -> None:
    """Every count 1..`limit` maps to the smallest size that takes it; `mapped[i]` is what count i + 1 maps to.

    The limit itself is a size even when it is off the stride: otherwise the largest batches have no recording.
    """
    require(list(sizes) == sorted(set(sizes)), f"{axis} sizes {list(sizes)} are not ascending and unique")
    last = sizes[-1] if sizes else None
    require(last == limit, f"the largest {axis} size is {last}, the limit is {limit}")
    require(len(mapped) == limit, f"{len(mapped)} {axis} counts are mapped, the limit is {limit}")
    index = 0
    for count, size in enumerate(mapped, start=1):
        index += sizes[index] < count
        require(
            size == sizes[index], f"{axis} {count} maps to {size}, the smallest size that takes it is {sizes[index]}"
        )


def _lines(rule: str, bad: list[int], values: list[int]) -> str:
    if not bad:
        return rule
    return f"{rule}, but line {bad[0]} says {values[bad[0]]} [{len(bad)} of {len(values)} lines]"
