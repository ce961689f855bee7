"""The four vectors of a decode step, written in place into buffers whose addresses never change.

A recording reads what lies at the addresses it was made with, so a step's token ids, positions, write slots and
context lengths go into fixed storage instead of new tensors. Every write also sets the tail behind the live rows to
neutral, whole, because a smaller batch after a larger one would otherwise leave write slots of sequences that are
gone, and a padded row would store its K/V in them. This module knows no plan and no table.

Gates: gates.inputs. Proof: tests/test_inputs.py. Story: inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fast.slots import stage
from gates.inputs import check_tail_neutral

FIELDS = ("input_ids", "positions", "write_slots", "context_lens")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's four vectors: windows on fixed buffers, so the next write moves them."""

    input_ids: Tensor  # [N] int64: this step's tokens
    positions: Tensor  # [N] int64: their absolute positions
    write_slots: Tensor  # [N] int64: where their K/V goes
    context_lens: Tensor  # [N] int64: tokens each row may read


@dataclass(frozen=True, slots=True, eq=False)
class LateIds:
    """Input ids that the device alone knows: entry `places[i]` of a step is `tokens[lines[i]]` of the step before."""

    tokens: Tensor  # [N] int64
    places: list[int]
    lines: list[int]

    def put(self, input_ids: Tensor) -> None:  # [N] int64, in place
        """Write them behind the host's ids, without waiting for either."""
        places, lines = stage([self.places, self.lines], input_ids.device)
        input_ids.index_copy_(0, places, self.tokens.index_select(0, lines))


class DecodeInputs:
    """Four `[max_batch_size]` int64 buffers that share one allocation, so that a device needs one copy a step.

    A padded row is (0, 0, `sink_slot`, 0): token 0 at position 0, stored where nothing reads, reading nothing.
    """

    def __init__(self, *, max_batch_size: int, sink_slot: int, device: torch.device | str = "cpu") -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size: {max_batch_size} is not in 1..")
        self.sink_slot = sink_slot
        self._neutral = (0, 0, sink_slot, 0)  # in the order of FIELDS
        self._buffer = torch.empty(len(FIELDS), max_batch_size, dtype=torch.int64, device=device)
        self._host = self._buffer.numpy() if self._buffer.device.type == "cpu" else None
        self.write(input_ids=(), positions=(), write_slots=(), context_lens=(), pad_rows=max_batch_size)

    @property
    def max_batch_size(self) -> int:
        """Rows that the buffers have."""
        return self._buffer.shape[1]

    @property
    def addresses(self) -> dict[str, int]:
        """Where each of the four buffers begins; constant from construction on."""
        return {name: self._buffer[index].data_ptr() for index, name in enumerate(FIELDS)}

    def write(
        self,
        *,
        input_ids: Sequence[int],
        positions: Sequence[int],
        write_slots: Sequence[int],
        context_lens: Sequence[int],
        pad_rows: int = 0,
    ) -> StepInputs:
        """Write one step's live rows in place, everything behind them neutral, and return windows on all N rows.

        Raises:
            ValueError: the four differ in length, or the rows and `pad_rows` together do not fit the buffers.
        """
        columns = (input_ids, positions, write_slots, context_lens)
        rows = len(input_ids)
        if any(len(column) != rows for column in columns):
            raise ValueError(f"rows: {dict(zip(FIELDS, map(len, columns), strict=True))} differ in length")
        if pad_rows < 0 or not 1 <= rows + pad_rows <= self.max_batch_size:
            raise ValueError(f"rows: {rows} + {pad_rows} padded is not in 1..{self.max_batch_size}")
        # A device gets the whole allocation in one copy; on a CPU the numpy view is the allocation itself.
        host = np.empty(self._buffer.shape, dtype=np.int64) if self._host is None else self._host
        for buffer, values, neutral in zip(host, columns, self._neutral, strict=True):
            buffer[:rows] = values
            buffer[rows:] = neutral
        if self._host is None:
            self._buffer.copy_(stage(host, self._buffer.device))
        self._check_tail(rows)
        return self.window(rows + pad_rows)

    def window(self, rows: int) -> StepInputs:
        """The first `rows` entries of each buffer, as views: same addresses for the same count, always."""
        return StepInputs(*self._buffer[:, :rows].unbind(0))

    def _check_tail(self, rows: int) -> None:
        whole = dict(zip(FIELDS, self._buffer.unbind(0), strict=True))
        neutral = dict(zip(FIELDS, self._neutral, strict=True))
        check_tail_neutral(buffers=whole, neutral=neutral, rows=rows)
