"""What must hold of a linear layer before a batch may be built on it: a row's bits are its own.

Gates: this file. Proof: tests/test_linear.py. Story: linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gates.core import CHEAP, gate, require, require_rows

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@gate("linear.rows_invariant", at=CHEAP)
def check_rows_invariant(
    *,
    wanted: Tensor,  # [R, N]: each row as it is in other company
    got: Tensor,  # [R, N]: the same rows, computed together
    rows: int,  # the count that the backend was asked for
    computed_rows: int,  # the count it ran, padding included
) -> None:
    """Every row has the very bits that it has in another batch: at load, and when a request is run again alone.

    Equality of bits, not of numbers: 0.0 and -0.0 differ, and a NaN equals itself. It reads tensors at the cheap level
    because it stands where nobody waits for a token.
    """
    require(wanted.shape == got.shape, f"{list(got.shape)} numbers were computed, {list(wanted.shape)} are wanted")
    kind = _BITS[got.element_size()]
    differs = (wanted.contiguous().view(kind) != got.contiguous().view(kind)).reshape(len(got), -1).any(dim=1)
    bad = differs.nonzero().flatten().tolist()
    fact = f"a row's bits do not depend on its batch, but do at {rows} rows computed as {computed_rows}"
    require_rows(bad, len(got), fact)
