"""The slot table: where every cached token lives, kept in one buffer that a decode step reads through.

Row r, column t is the slot of token t of the sequence in row r. The buffer is allocated once and written one cell
a row and step, so a decode step's rectangle is not built, it is pointed at: `slots[:n, :w]` is a view whenever
the rows are the prefix 0..n-1. Any other row set is an `index_select` copy. The table mirrors block tables and
knows nothing of requests, blocks or the pool; its lengths are host integers, so asking for one never waits for
a device. `rebuild_mapping` is the construction that it replaces: the resync path, the oracle and the slow arm.

Gates: gates.slots. Proof: tests/test_slots.py. Story: slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fast.blocks import BlockTable
from gates.slots import check_gather_narrow

CELL_BYTES = 8  # one int64


def table_cells(*, max_batch_size: int, max_model_len: int) -> int:
    """Cells of a slot table: one a token that a row could ever hold."""
    return max_batch_size * max_model_len


def table_bytes(*, max_batch_size: int, max_model_len: int) -> int:
    """Bytes a slot table reserves for the life of the process, before a single token lands."""
    return CELL_BYTES * table_cells(max_batch_size=max_batch_size, max_model_len=max_model_len)


def block_table_cells(*, max_batch_size: int, max_model_len: int, block_size: int) -> int:
    """Cells of the same addressing as block ids, for a kernel that does the multiply itself."""
    return max_batch_size * -(-max_model_len // block_size)


def block_table_bytes(*, max_batch_size: int, max_model_len: int, block_size: int) -> int:
    """Bytes of the same addressing as int64 block ids: `block_size` times fewer than `table_bytes`."""
    cells = block_table_cells(max_batch_size=max_batch_size, max_model_len=max_model_len, block_size=block_size)
    return CELL_BYTES * cells


def incremental_cells(*, rows: int, prompt_tokens: int, steps: int) -> int:
    """Cells a slot table writes for a run: each prompt copied in once, then one cell a row and step."""
    return rows * (prompt_tokens + steps)


def rebuilt_cells(*, rows: int, prompt_tokens: int, steps: int) -> int:
    """Cells a rebuild writes for the same run: the whole rectangle at every step, quadratic in `steps`."""
    return rows * (steps * prompt_tokens + steps * (steps + 1) // 2)


def resident_share(lengths: Sequence[int], *, max_batch_size: int, max_model_len: int) -> float:
    """Share of the reserved cells that hold a live token, 0..1."""
    return sum(lengths) / table_cells(max_batch_size=max_batch_size, max_model_len=max_model_len)


def rebuild_mapping(tables: Sequence[BlockTable], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The rectangle of `rows`, built on the host from their block tables: O(rows * longest) every time.

    Returns:
        `slot_mapping` [R, W] int64 with W the longest row, shorter rows padded with slot 0, and `context_lens` [R].
    """
    lengths = [tables[row].length for row in rows]
    width = max(lengths, default=0)
    # The pad is a real memory access: a read gathers before it masks, and -1 would wrap onto the last slot.
    grid = [tables[row].slots(0, length) + [0] * (width - length) for row, length in zip(rows, lengths, strict=True)]
    mapping = torch.tensor(grid, dtype=torch.int64).reshape(len(lengths), width)
    return mapping, torch.tensor(lengths, dtype=torch.int64)


def stage(values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray, device: torch.device) -> Tensor:
    """A new int64 tensor on `device` holding host integers, by one copy.

    On CUDA the copy goes through pinned memory and does not wait. The pinned block comes from torch's caching
    host allocator, which does not hand it out again before the copy has run, so no step overwrites another's.
    """
    host = torch.from_numpy(np.array(values, dtype=np.int64))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class SlotTable:
    """`[max_batch_size, max_model_len]` int64 slots, allocated here and never again.

    `gather=True` is the other design: rows never move, and every read copies its rows into a second fixed buffer,
    so the address stays one that a recording can hold at the price of rows * width cells a step.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
        gather: bool = False,
    ) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("max_model_len", max_model_len)):
            if value < 1:
                raise ValueError(f"{name}: {value} is not in 1..")
        self.slots = torch.zeros(max_batch_size, max_model_len, dtype=torch.int64, device=device)
        self._gathered = torch.zeros_like(self.slots) if gather else None
        self._lengths = [0] * max_batch_size
        self._bind()
        self.appended_cells = self.resynced_cells = self.moved_cells = 0
        self.resyncs = self.windows = self.gathers = 0

    @property
    def max_batch_size(self) -> int:
        """Rows of the table."""
        return self.slots.shape[0]

    @property
    def max_model_len(self) -> int:
        """Columns of the table: the most tokens one row can hold."""
        return self.slots.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes that the table has taken, the gather's second buffer included."""
        return self.slots.nbytes + (0 if self._gathered is None else self._gathered.nbytes)

    @property
    def read_buffer(self) -> Tensor:  # [max_batch_size, max_model_len]
        """The storage whose windows keep one address: the table itself, or the gather's target."""
        return self.slots if self._gathered is None else self._gathered

    @property
    def address(self) -> int:
        """Where `read_buffer` begins: the number that a recording binds to."""
        return self.read_buffer.data_ptr()

    @property
    def written_cells(self) -> int:
        """Cells written so far to follow the block tables (moves not counted)."""
        return self.appended_cells + self.resynced_cells

    @property
    def window_share(self) -> float:
        """Share of reads that copied nothing, 0..1; 1 before the first read."""
        reads = self.windows + self.gathers
        return self.windows / reads if reads else 1.0

    def length(self, row: int) -> int:
        """Tokens that the table holds for `row`."""
        return self._lengths[row]

    def lengths(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Tokens of each of `rows`, as host integers that no later write can move."""
        lengths = self._lengths
        return tuple([lengths[row] for row in rows])

    def is_window(self, mapping: Tensor) -> bool:  # [N, W]
        """True when `mapping` lies at `address` with the table's row stride, so a recording may hold it."""
        return mapping.data_ptr() == self.address and mapping.stride() == self.read_buffer.stride()

    def append(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Write one slot a row, each at its row's own next column: one vectorised write, all rows or none.

        Raises:
            ValueError: a row is named twice, or is full, or a slot is negative; nothing was written.
        """
        lengths, width = self._lengths, self.max_model_len
        if len(set(rows)) != len(rows) or len(rows) != len(slots):
            raise ValueError(f"append: {len(slots)} slots for rows {tuple(rows)}; each row takes exactly one")
        if slots and min(slots) < 0:
            raise ValueError(f"append: slot {min(slots)} is negative; a read would wrap it onto a stranger's token")
        full = [row for row in rows if lengths[row] >= width]
        if full:
            raise ValueError(f"append: rows {full} already hold {width} tokens, all that a row can")
        self._put([row * width + lengths[row] for row in rows], slots)
        for row in rows:
            lengths[row] += 1
        self.appended_cells += len(rows)

    def extend(self, row: int, slots: Sequence[int]) -> None:
        """Write the slots of one row's next tokens, a prefill's: as many cells as there are new tokens.

        Raises:
            ValueError: the row cannot hold them, or a slot is negative; nothing was written.
        """
        start = self._lengths[row]
        stop = start + len(slots)
        if stop > self.max_model_len or min(slots, default=0) < 0:
            raise ValueError(f"extend: row {row} of {self.max_model_len} takes {len(slots)} slots after {start}")
        if self._host is not None:
            at = row * self.max_model_len
            self._host[at + start : at + stop] = slots
        else:
            self.slots[row, start:stop].copy_(stage(slots, self.slots.device))
        self._lengths[row] = stop
        self.appended_cells += len(slots)

    def resync(self, table: BlockTable, row: int) -> None:
        """Copy a whole row in from its block table: once a tenant, O(length).

        Raises:
            ValueError: the block table holds more tokens than a row can.
        """
        if table.length > self.max_model_len:
            raise ValueError(f"resync: row {row} holds {table.length} tokens, the table has {self.max_model_len}")
        mapping, _ = rebuild_mapping([table], (0,))
        self.slots[row, : table.length].copy_(mapping[0])
        self._lengths[row] = table.length
        self.resynced_cells += table.length
        self.resyncs += 1

    def sync(self, tables: Sequence[BlockTable], rows: Sequence[int]) -> None:
        """Resync those of `rows` whose length disagrees with their block table.

        Length alone is enough because a row's slots change in two ways only: an append, which goes through here,
        and a change of tenant, which goes through `reset` (and `BlockTable.adopt` refuses a table in use).
        """
        lengths = self._lengths
        for row in [row for row in rows if lengths[row] != tables[row].length]:
            self.resync(tables[row], row)

    def reset(self, row: int) -> None:
        """Forget a row's tenant. No cell is cleared: what lies past a length is never read, only legal."""
        self._lengths[row] = 0

    def move_row(self, src: int, dst: int) -> None:
        """Relabel: copy `length(src)` cells onto `dst` inside the buffer and leave `src` empty.

        Raises:
            ValueError: `dst` still holds tokens, so the plan was made against another occupancy.
        """
        length = self._lengths[src]
        if src == dst or self._lengths[dst]:
            raise ValueError(f"move_row: row {src} -> {dst}, but row {dst} holds {self._lengths[dst]} tokens")
        self.slots[dst, :length].copy_(self.slots[src, :length])
        self._lengths[dst], self._lengths[src] = length, 0
        self.moved_cells += length

    def read(self, rows: Sequence[int], width: int, pad_rows: int = 0) -> tuple[Tensor, Tensor]:
        """The rectangle of `rows` and `pad_rows` more, and how much of each row is real.

        Returns:
            `slot_mapping` [N, width], live storage when it is a window: a later append to a short row writes inside
            it, past its length. `context_lens` [N], always a copy, and 0 for a padded row: lengths that moved
            with the table could never be found stale.

        Raises:
            ValueError: no row at all, more than the table has, or a width that does not cover every row.
        """
        mapping = self.rectangle(rows, width, pad_rows)
        return mapping, stage([*self.lengths(rows), *[0] * pad_rows], self.slots.device)

    def rectangle(self, rows: Sequence[int], width: int, pad_rows: int = 0) -> Tensor:  # [N, width]
        """The first half of `read`, for a caller that keeps the lengths itself."""
        rows = tuple(rows)
        total = len(rows) + pad_rows
        self._refuse_read(rows, width, total)
        prefix = rows == tuple(range(len(rows)))
        if prefix and self._gathered is None:
            self.windows += 1
            return self.slots[:total, :width]
        self.gathers += 1
        # Narrowed before the gather: indexing first would copy max_model_len columns to keep `width` of them.
        source, index = self.slots[:, :width], stage(rows, self.slots.device)
        if self._gathered is not None:
            if rows:
                torch.index_select(source, 0, index, out=self._gathered[: len(rows), :width])
            return self._gathered[:total, :width]
        # A padded row has length 0, so it may repeat any row; row 0 always exists.
        copied = source.index_select(0, torch.nn.functional.pad(index, (0, pad_rows)))
        storage = copied.untyped_storage().nbytes() // CELL_BYTES
        check_gather_narrow(copied_cells=storage, read_cells=copied.numel())
        return copied

    def to(self, device: torch.device | str) -> SlotTable:
        """Move to another device. This reallocates: no window taken before it is the table's any more."""
        self.slots = self.slots.to(device)
        self._gathered = None if self._gathered is None else self._gathered.to(device)
        self._bind()
        return self

    def render(self) -> str:
        """One line about the table, for people."""
        return (
            f"slot table {self.max_batch_size} x {self.max_model_len}: {sum(self._lengths)} tokens held, "
            f"{self.appended_cells} cells appended, {self.resynced_cells} resynced in {self.resyncs} resyncs, "
            f"{self.moved_cells} moved, {self.windows} windows and {self.gathers} gathers "
            f"({self.window_share:.0%} windows)"
        )

    def _bind(self) -> None:
        # On a CPU a numpy view of the same cells writes a step's handful in 2 microseconds where torch takes 10.
        self._host = self.slots.view(-1).numpy() if self.slots.device.type == "cpu" else None

    def _put(self, cells: list[int], values: Sequence[int]) -> None:
        if self._host is not None:
            self._host[cells] = values
            return
        staged = stage([cells, list(values)], self.slots.device)
        self.slots.view(-1).index_copy_(0, staged[0], staged[1])

    def _refuse_read(self, rows: tuple[int, ...], width: int, total: int) -> None:
        if not len(rows) <= total <= self.max_batch_size or total == 0:
            raise ValueError(f"read: {len(rows)} rows padded to {total} is not in 1..{self.max_batch_size}")
        longest = max(self.lengths(rows), default=0)
        if not max(1, longest) <= width <= self.max_model_len:
            raise ValueError(f"width: {width} is not in {max(1, longest)}..{self.max_model_len} (longest row..table)")
