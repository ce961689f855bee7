"""What one decode step will address, as frozen data: made first, checked, then executed elsewhere.

Gates: gates.plan. Proof: tests/test_plan.py. Story: plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One decode step over R real rows padded to N = R + `pad_rows`, reading W columns of addressing.

    `lengths` and `slots` are the plan's own host copies of what the tensors said when it was made. They cannot
    move, so they are what a gate compares shared storage with: live state is never compared with live state.
    """

    rows: tuple[int, ...]  # R row indices in the persistent batch
    pad_rows: int  # N - R
    slot_mapping: Tensor  # [N, W] int64: a window on the slot table, or a gathered copy
    context_lens: Tensor  # [N] int64: tokens each row may read, this step's included; 0 for a padded row
    write_slots: Tensor  # [N] int64: where this step's K/V goes; the sink slot for a padded row
    positions: Tensor  # [N] int64: absolute position of this step's token; 0 for a padded row
    input_ids: Tensor  # [N] int64: this step's tokens; 0 for a padded row
    lengths: tuple[int, ...]  # R: context_lens of the real rows
    slots: tuple[int, ...]  # R: write_slots of the real rows
    bucket: tuple[int, int] | None = None  # (rows, width) this plan was padded to, None when exact

    @property
    def num_rows(self) -> int:
        """Rows the forward sees, padding included (N)."""
        return len(self.rows) + self.pad_rows

    @property
    def width(self) -> int:
        """Columns of addressing the forward sees (W)."""
        return self.slot_mapping.shape[1]
