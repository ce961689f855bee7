"""Every batch has a smallest bucket, the maximum included, and padding reads nothing and harms nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fast.blocks import BlockAllocator, BlockTable
from fast.buckets import BucketSet, power_of_two_rows, sink_slot, stride_widths
from gates import GateError
from gates.buckets import check_bucket_covers, check_pad_finite, check_pad_inert
from tests.addressing import Paged

LIMITS = [1, 2, 3, 7, 8, 9, 12, 20, 31, 32, 33, 50, 256, 700]


def smallest(sizes: tuple[int, ...], count: int) -> int:
    """The smallest size that takes `count`, by looking at all of them."""
    return min(size for size in sizes if size >= count)


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", LIMITS)
def test_every_row_count_maps_to_the_smallest_size_and_the_limit_is_one(limit: int):
    buckets = BucketSet(max_batch_size=limit, max_model_len=8, width_multiple=8)
    assert buckets.row_sizes[-1] == limit
    assert list(buckets.row_sizes) == sorted(set(buckets.row_sizes))
    for rows in range(1, limit + 1):
        assert buckets.bucket_for(rows, 1) == (smallest(buckets.row_sizes, rows), 8)
        assert rows + buckets.pad_rows(rows) == smallest(buckets.row_sizes, rows)


@pytest.mark.parametrize(("limit", "multiple"), [(1, 16), (15, 16), (16, 16), (17, 16), (70, 16), (128, 16), (7, 1)])
def test_every_width_maps_to_the_smallest_bucket_and_none_exceeds_the_table(limit: int, multiple: int):
    buckets = BucketSet(max_batch_size=2, max_model_len=limit, width_multiple=multiple)
    assert buckets.widths[-1] == limit
    for width in range(1, limit + 1):
        assert buckets.bucket_for(1, width)[1] == smallest(buckets.widths, width) <= limit


def test_powers_of_two_and_strides_include_a_limit_off_the_grid():
    assert power_of_two_rows(1) == (1,)
    assert power_of_two_rows(12) == (1, 2, 4, 8, 12)
    assert power_of_two_rows(16) == (1, 2, 4, 8, 16)
    assert stride_widths(70, 32) == (32, 64, 70)
    assert stride_widths(64, 32) == (32, 64)


def test_a_serving_size_set_has_576_shapes():
    buckets = BucketSet(max_batch_size=256, max_model_len=8192, width_multiple=128)
    assert (len(buckets.row_sizes), len(buckets.widths), buckets.num_shapes) == (9, 64, 576)
    assert len(set(buckets.shapes)) == 576
    assert buckets.shapes == tuple(sorted(buckets.shapes))


def test_a_given_list_of_row_sizes_replaces_the_powers_and_still_ends_at_the_limit():
    buckets = BucketSet(max_batch_size=20, max_model_len=8, row_sizes=(12, 3, 6, 3))
    assert buckets.row_sizes == (3, 6, 12, 20)
    assert [buckets.bucket_for(rows, 1)[0] for rows in (1, 3, 4, 7, 13, 20)] == [3, 3, 6, 12, 20, 20]


@pytest.mark.parametrize("changes", [{"max_batch_size": 0}, {"max_model_len": 0}, {"width_multiple": 0}])
def test_a_set_without_shapes_is_refused(changes: dict[str, int]):
    with pytest.raises(ValueError, match=rf"{next(iter(changes))}: 0 is not in 1\.\."):
        BucketSet(**{"max_batch_size": 4, "max_model_len": 8, **changes})


@pytest.mark.parametrize("sizes", [(0, 2), (2, 9)])
def test_a_row_size_outside_the_batch_is_refused(sizes: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"row_sizes: \[\d\] are not in 1\.\.8"):
        BucketSet(max_batch_size=8, max_model_len=8, row_sizes=sizes)


@pytest.mark.parametrize(("rows", "width"), [(0, 1), (5, 1), (1, 0), (1, 33)])
def test_a_batch_beyond_the_set_is_refused(rows: int, width: int):
    with pytest.raises(ValueError, match=r"is not in 1\.\.(4|32)"):
        BucketSet(max_batch_size=4, max_model_len=32).bucket_for(rows, width)


def test_padding_is_counted_in_rows_and_in_cells():
    buckets = BucketSet(max_batch_size=4, max_model_len=32, width_multiple=8)
    assert (buckets.row_padding_share, buckets.cell_padding_share) == (0.0, 0.0)
    buckets.count(rows=3, tokens=9 + 2 + 1, bucket=(4, 16))
    assert (buckets.real_rows, buckets.padded_rows, buckets.row_padding_share) == (3, 1, 0.25)
    assert (buckets.real_cells, buckets.padded_cells, buckets.cell_padding_share) == (12, 52, 52 / 64)
    buckets.count(rows=4, tokens=64, bucket=(4, 16))
    assert (buckets.steps, buckets.row_padding_share, buckets.cell_padding_share) == (2, 1 / 8, 52 / 128)


def test_shares_are_parts_of_the_whole_and_zero_before_the_first_step():
    buckets = BucketSet(max_batch_size=4, max_model_len=4)
    assert (buckets.row_padding_share, buckets.cell_padding_share) == (0.0, 0.0)
    buckets.count(rows=3, tokens=4, bucket=(4, 4))
    assert (buckets.row_padding_share, buckets.cell_padding_share) == (1 / 4, 12 / 16)
    buckets.count(rows=1, tokens=4, bucket=(2, 4))
    assert buckets.row_padding_share == 2 / 6
    half = BucketSet(max_batch_size=4, max_model_len=4)
    half.count(rows=2, tokens=8, bucket=(4, 4))
    assert (half.row_padding_share, half.cell_padding_share) == (0.5, 0.5)


def test_a_set_of_one_token_pads_rows_and_the_width_is_a_multiple_of_128():
    assert BucketSet(max_batch_size=4, max_model_len=1).pad_rows(3) == 1
    assert BucketSet(max_batch_size=1, max_model_len=300).widths == (128, 256, 300)


def test_no_block_can_name_the_sink():
    allocator, table = BlockAllocator(5), BlockTable(16)
    table.adopt(allocator.allocate(5))
    assert max(table.advance(80)) == 79
    assert sink_slot(num_blocks=5, block_size=16) == 80


@pytest.mark.parametrize("live", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_padded_rows_change_one_slot_of_the_pool_and_it_is_the_sink(live: int, poison: float):
    paged = Paged(8, 16, block_size=4)
    for row in range(8):
        paged.adopt(row, 12)  # the pool's last blocks belong to somebody
    buckets = BucketSet(max_batch_size=8, max_model_len=16, width_multiple=8)
    plan = paged.plan(range(live), buckets=buckets)
    pool = torch.arange(paged.sink + 1, dtype=torch.float64)
    before = pool.clone()
    pool[plan.write_slots[live:]] = poison
    assert torch.equal(pool[: paged.sink], before[: paged.sink])
    assert plan.context_lens[live:].tolist() == [0] * plan.pad_rows
    assert plan.num_rows == smallest(buckets.row_sizes, live)


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [12, 20, 700])
def test_gate_rejects_a_stride_that_misses_the_largest_batches(limit: int):
    sizes = [size for size in (1, 2, 4, 8, *range(16, 1024, 16)) if size < limit]
    mapped = [smallest((*sizes, limit), count) for count in range(1, limit + 1)]
    with pytest.raises(
        GateError, match=rf"buckets\.covers: the largest rows size is {sizes[-1]}, the limit is {limit}"
    ):
        check_bucket_covers(axis="rows", sizes=sizes, limit=limit, mapped=mapped)


def test_gate_rejects_a_bucket_set_that_ends_past_the_limit_it_was_given():
    buckets = BucketSet(max_batch_size=4, max_model_len=32, width_multiple=16)
    with pytest.raises(GateError, match="the largest rows size is 4, the limit is 3"):
        buckets._check_covers(3, 32)  # the caller's limit, and not the one that the list itself ends at
    with pytest.raises(GateError, match="the largest width size is 32, the limit is 33"):
        buckets._check_covers(4, 33)


def test_gate_rejects_a_padded_row_whose_logits_are_no_numbers():
    logits = torch.zeros(4, 3)
    logits[3, 1] = float("nan")
    check_pad_finite(logits=logits, pad_rows=0)  # a real row's own trouble: its request fails alone
    troubled = logits.clone()
    troubled[0] = float("inf")
    check_pad_finite(logits=troubled, pad_rows=2)  # and a model that is no numbers throughout is another's to report
    with pytest.raises(GateError, match=r"padded rows are not finite, first at line \[3\] \[1 of 2\]"):
        check_pad_finite(logits=logits, pad_rows=2)


def test_gate_rejects_a_count_that_maps_past_the_smallest_size():
    with pytest.raises(GateError, match="rows 2 maps to 4, the smallest size that takes it is 2"):
        check_bucket_covers(axis="rows", sizes=[1, 2, 4], limit=4, mapped=[1, 4, 4, 4])


def test_gate_rejects_a_count_that_maps_to_a_size_too_small():
    with pytest.raises(GateError, match="rows 3 maps to 2, the smallest size that takes it is 4"):
        check_bucket_covers(axis="rows", sizes=[1, 2, 4], limit=4, mapped=[1, 2, 2, 4])


@pytest.mark.parametrize("sizes", [[1, 4, 2, 4], [1, 1, 4], [4, 2, 1]])
def test_gate_rejects_sizes_out_of_order(sizes: list[int]):
    with pytest.raises(GateError, match="are not ascending and unique"):
        check_bucket_covers(axis="rows", sizes=sizes, limit=4, mapped=[4] * 4)


def test_gate_rejects_a_map_with_a_gap_at_its_end():
    with pytest.raises(GateError, match="3 rows counts are mapped, the limit is 4"):
        check_bucket_covers(axis="rows", sizes=[1, 2, 4], limit=4, mapped=[1, 2, 4])


def padded(lens: list[int], writes: list[int], pad_rows: int) -> dict[str, Any]:
    """A step's last two vectors as their gate takes them, over a pool of 80 slots."""
    vectors = {"context_lens": torch.tensor(lens), "write_slots": torch.tensor(writes)}
    return {**vectors, "pad_rows": pad_rows, "sink_slot": 80}


def test_gate_rejects_a_padded_row_that_reads():
    check_pad_inert(**padded([5, 3, 0, 0], [4, 9, 80, 80], 2))
    with pytest.raises(GateError, match=re.escape("padded rows have context_len 0, but line 3 says 7 [1 of 4 lines]")):
        check_pad_inert(**padded([5, 3, 0, 7], [4, 9, 80, 80], 2))


@pytest.mark.parametrize("slot", [-1, 0, 79, 81])
def test_gate_rejects_a_padded_row_that_writes_where_somebody_lives(slot: int):
    # -1 is what a sentinel would be: plain indexing takes it for the pool's last slot.
    with pytest.raises(GateError, match=f"padded rows write to the sink, slot 80, but line 2 says {slot} "):
        check_pad_inert(**padded([5, 3, 0, 0], [4, 9, slot, 80], 2))


def test_gate_rejects_a_real_row_that_writes_to_the_sink():
    with pytest.raises(GateError, match="no real row writes to the sink, slot 80, but line 1 says 80"):
        check_pad_inert(**padded([5, 3, 0, 0], [4, 80, 80, 80], 2))


def test_gate_rejects_a_warm_batch_whose_rows_are_not_all_padding():
    check_pad_inert(**padded([0, 0], [80, 80], 2))
    with pytest.raises(GateError, match="no real row writes to the sink"):
        check_pad_inert(**padded([0, 0], [80, 80], 1))


# ---- any order --------------------------------------------------------------------------------------------------


@given(data=st.data(), limit=st.integers(1, 90), length=st.integers(1, 300), multiple=st.integers(1, 64))
def test_any_set_covers_any_batch_with_a_member_of_itself(data: st.DataObject, limit: int, length: int, multiple: int):
    sizes = data.draw(st.none() | st.lists(st.integers(1, limit), max_size=6))
    buckets = BucketSet(max_batch_size=limit, max_model_len=length, width_multiple=multiple, row_sizes=sizes)
    rows, width = data.draw(st.integers(1, limit)), data.draw(st.integers(1, length))
    bucket = buckets.bucket_for(rows, width)
    assert bucket == (smallest(buckets.row_sizes, rows), smallest(buckets.widths, width))
    assert bucket in buckets.shapes
    assert len(buckets.shapes) == buckets.num_shapes
