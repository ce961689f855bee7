"""A step's four vectors keep their addresses, and nothing of a larger batch before stands behind a smaller one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fast.inputs import FIELDS, DecodeInputs, StepInputs
from gates import GateError
from gates.inputs import check_addresses_stable, check_tail_neutral

SINK = 80
NEUTRAL = dict(zip(FIELDS, (0, 0, SINK, 0), strict=True))


def write(inputs: DecodeInputs, rows: int, pad_rows: int = 0, base: int = 10) -> StepInputs:
    """A batch whose numbers are all different from each other and from neutral."""
    return inputs.write(
        input_ids=[base + row for row in range(rows)],
        positions=[base + 100 + row for row in range(rows)],
        write_slots=[base + 20 + row for row in range(rows)],
        context_lens=[base + 101 + row for row in range(rows)],
        pad_rows=pad_rows,
    )


def whole(inputs: DecodeInputs) -> dict[str, torch.Tensor]:
    """The four buffers end to end, by name."""
    step = inputs.window(inputs.max_batch_size)
    return {name: getattr(step, name) for name in FIELDS}


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 7, 8])
def test_a_step_reads_back_what_was_written_and_padding_is_neutral(rows: int):
    inputs = DecodeInputs(max_batch_size=8, sink_slot=SINK)
    step = write(inputs, rows, pad_rows=8 - rows)
    assert step.input_ids.tolist() == [*range(10, 10 + rows), *[0] * (8 - rows)]
    assert step.positions.tolist() == [*range(110, 110 + rows), *[0] * (8 - rows)]
    assert step.write_slots.tolist() == [*range(30, 30 + rows), *[SINK] * (8 - rows)]
    assert step.context_lens.tolist() == [*range(111, 111 + rows), *[0] * (8 - rows)]


def test_buffers_start_neutral_before_any_step():
    buffers = whole(DecodeInputs(max_batch_size=3, sink_slot=SINK))
    check_tail_neutral(buffers=buffers, neutral=NEUTRAL, rows=0)


def test_a_step_is_windows_on_buffers_that_never_move():
    inputs = DecodeInputs(max_batch_size=8, sink_slot=SINK)
    recorded = inputs.addresses
    assert list(recorded) == list(FIELDS)
    assert len(set(recorded.values())) == 4
    for rows in (8, 1, 5):
        step = write(inputs, rows)
        assert {name: getattr(step, name).data_ptr() for name in FIELDS} == recorded
        assert all(getattr(step, name).is_contiguous() for name in FIELDS)
        check_addresses_stable(recorded=recorded, now=inputs.addresses)


def test_a_held_window_reads_the_next_step():
    inputs = DecodeInputs(max_batch_size=4, sink_slot=SINK)
    held = write(inputs, 3)
    write(inputs, 2, base=40)
    assert held.input_ids.tolist() == [40, 41, 0]
    assert held.write_slots.tolist() == [60, 61, SINK]


@pytest.mark.parametrize("rows", [0, 1, 3, 7])
def test_a_smaller_batch_leaves_nothing_of_a_larger_one(rows: int):
    inputs = DecodeInputs(max_batch_size=8, sink_slot=SINK)
    write(inputs, 8)
    write(inputs, rows, pad_rows=1)  # padded to less than the whole: the rest is neutral all the same
    for name, buffer in whole(inputs).items():
        assert buffer[rows:].tolist() == [NEUTRAL[name]] * (8 - rows)


def test_nothing_is_padded_unless_it_is_asked_for():
    inputs = DecodeInputs(max_batch_size=3, sink_slot=40)
    step = inputs.write(input_ids=[7], positions=[2], write_slots=[5], context_lens=[3])
    assert step.input_ids.shape == (1,)
    assert inputs.sink_slot == 40


def test_a_batch_of_nothing_but_padding_is_legal():
    step = write(DecodeInputs(max_batch_size=4, sink_slot=SINK), 0, pad_rows=4)
    assert step.write_slots.tolist() == [SINK] * 4
    assert step.context_lens.tolist() == [0] * 4


@pytest.mark.parametrize(("rows", "pad_rows"), [(0, 0), (5, 0), (3, 2), (2, -1)])
def test_a_batch_that_does_not_fit_is_refused_and_nothing_is_written(rows: int, pad_rows: int):
    inputs = DecodeInputs(max_batch_size=4, sink_slot=SINK)
    write(inputs, 2)
    before = {name: buffer.clone() for name, buffer in whole(inputs).items()}
    with pytest.raises(ValueError, match=r"rows: \d \+ -?\d padded is not in 1\.\.4"):
        write(inputs, rows, pad_rows, base=50)
    assert all(torch.equal(before[name], buffer) for name, buffer in whole(inputs).items())


def test_vectors_of_different_lengths_are_refused():
    inputs = DecodeInputs(max_batch_size=4, sink_slot=SINK)
    with pytest.raises(ValueError, match=r"'positions': 1.*differ in length"):
        inputs.write(input_ids=[1, 2], positions=[3], write_slots=[4, 5], context_lens=[6, 7])
    with pytest.raises(ValueError, match="max_batch_size: 0"):
        DecodeInputs(max_batch_size=0, sink_slot=SINK)


@pytest.mark.gpu
def test_a_device_gets_the_same_numbers_at_addresses_that_stay():
    inputs = DecodeInputs(max_batch_size=8, sink_slot=SINK, device="cuda")
    recorded, mirror = inputs.addresses, DecodeInputs(max_batch_size=8, sink_slot=SINK)
    for rows in (8, 3, 5, 1):
        on_device, on_host = write(inputs, rows, base=rows), write(mirror, rows, base=rows)
        assert all(torch.equal(getattr(on_device, name).cpu(), getattr(on_host, name)) for name in FIELDS)
        check_addresses_stable(recorded=recorded, now=inputs.addresses)


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_gate_rejects_a_vector_that_was_replaced_instead_of_written():
    inputs = DecodeInputs(max_batch_size=4, sink_slot=SINK)
    recorded = inputs.addresses
    inputs._buffer = inputs._buffer.clone()  # a new tensor with the right numbers, where no recording looks
    with pytest.raises(
        GateError, match=r"inputs\.addresses: input_ids was at 0x\w+ and is now at 0x\w+.*4 of 4 buffers"
    ):
        check_addresses_stable(recorded=recorded, now=inputs.addresses)


def test_gate_rejects_a_set_of_buffers_with_one_missing():
    recorded = DecodeInputs(max_batch_size=4, sink_slot=SINK).addresses
    fewer = {name: address for name, address in recorded.items() if name != "write_slots"}
    with pytest.raises(GateError, match=r"buffers were \[.*'write_slots'\], are now"):
        check_addresses_stable(recorded=recorded, now=fewer)


def test_gate_rejects_a_tail_that_a_larger_batch_left_behind():
    inputs = DecodeInputs(max_batch_size=4, sink_slot=SINK)
    write(inputs, 4)
    buffers = whole(inputs)
    for name, buffer in buffers.items():
        buffer[:2] = NEUTRAL[name]  # the fault: only the live rows are written, the rest keep what they had
    with pytest.raises(
        GateError, match=r"inputs\.tail: input_ids line 2 is 12, behind 2 live rows it is to be 0 \[2 stale"
    ):
        check_tail_neutral(buffers=buffers, neutral=NEUTRAL, rows=2)
    with pytest.raises(GateError, match="write_slots line 2 is 32, behind 2 live rows it is to be 80"):
        check_tail_neutral(buffers={"write_slots": buffers["write_slots"]}, neutral=NEUTRAL, rows=2)


# ---- any order --------------------------------------------------------------------------------------------------


@given(data=st.data(), size=st.integers(1, 9))
def test_any_sequence_of_batches_leaves_live_rows_and_neutral_ones(data: st.DataObject, size: int):
    inputs = DecodeInputs(max_batch_size=size, sink_slot=SINK)
    recorded = inputs.addresses
    for base in range(data.draw(st.integers(1, 6))):
        rows = data.draw(st.integers(0, size))
        pad_rows = data.draw(st.integers(0 if rows else 1, size - rows if rows else size))
        step = write(inputs, rows, pad_rows, base=base)
        assert step.input_ids.shape == (rows + pad_rows,)
        assert step.write_slots[:rows].tolist() == list(range(base + 20, base + 20 + rows))
        check_tail_neutral(buffers=whole(inputs), neutral=NEUTRAL, rows=rows)
        check_addresses_stable(recorded=recorded, now=inputs.addresses)
