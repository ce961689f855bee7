"""Linear layers packed once at load by torch's own backends, and the row counts at which a row's bits are its own.

`fp16` packs halves for FBGEMM (x86), `fp32` reorders float32 for oneDNN, `plain` is `F.linear`: the control, whose rows
change with their company. A backend picks its inner kernel by row count, and some kernels add in another order. So a
probe at load finds, on this machine and for every shape of the model, the counts at which each row has the bits it has
anywhere else; a table maps each count to the smallest of those that holds it, and rows are padded up to it, padding
last. The kernels in `fast.kernels` need no table. This module knows matrices, and no model, row or request.

Gates: gates.linear. Proof: tests/test_linear.py. Story: linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from gates.linear import check_rows_invariant
from reference.weights import LayerWeights, ModelWeights

Linear = Callable[[Tensor], Tensor]  # [R, in] -> [R, out]

MATRICES = ("q", "k", "v", "output", "gate", "up", "down")
MAX_LOSSY_SHARE = 1e-4  # of all weights; beyond it halves are another model than the checkpoint
_PROBE_ROWS = 7  # different rows in a probe: coprime to every tile size, so each meets every place in a tile
_EVERY_COUNT = 64  # counts up to here are all probed, larger ones in steps
_STEP = 12


def fp16_linear(
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
) -> Linear:
    """Halves packed for FBGEMM; products and sums are float32."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)


def fp32_linear(
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
) -> Linear:
    """Float32 reordered for oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.float(), None)
    wide = None if bias is None else bias.float()
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, wide, "none", [], "")


def plain_linear(
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
) -> Linear:
    """The linear layer as torch has it."""
    return lambda x: F.linear(x, weight, bias)


BACKENDS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {
    "fp16": fp16_linear,
    "fp32": fp32_linear,
    "plain": plain_linear,
}


@dataclass(frozen=True, slots=True)
class RowTable:
    """The stable row counts, ascending, and the counts that were probed and found to change some row."""

    sizes: tuple[int, ...]
    deviants: tuple[int, ...]

    def padded(self, rows: int) -> int:
        """The smallest stable count that holds `rows`, or `rows` itself when there is none."""
        return next((size for size in self.sizes if size >= rows), rows)


class PackedLinears:
    """Makes a model's linear layers on one backend: hand it to a forward as its `linear`, then call `settle`.

    `max_rows` is the most rows one product runs; more are done in parts, so the probe has an end.

    Raises:
        ValueError: a backend that does not exist, or `max_rows` below 1.
    """

    def __init__(self, backend: str, *, max_rows: int) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
        if max_rows < 1:
            raise ValueError(f"max_rows: {max_rows} is not in 1..")
        self.backend = backend
        self.max_rows = max_rows
        self.table = RowTable((), ())
        self._made: dict[tuple[int, int, bool], Linear] = {}  # one layer of each shape, for the probe

    @property
    def invariant(self) -> bool:
        """True when every row has the same bits at every count, after padding. False before `settle`."""
        return bool(self.table.sizes)

    def __call__(
        self,
        weight: Tensor,  # [out, in]
        bias: Tensor | None,  # [out]
    ) -> Linear:
        """A layer that pads its rows to the table's counts."""
        made = BACKENDS[self.backend](weight, bias)
        self._made.setdefault((weight.shape[1], weight.shape[0], bias is not None), made)

        def run(x: Tensor) -> Tensor:  # [..., in] -> [..., out]
            flat = x.reshape(-1, x.shape[-1])
            most = self.table.sizes[-1] if self.table.sizes else self.max_rows
            parts = [self._padded(made, part) for part in flat.split(most)]
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(*x.shape[:-1], -1)

        return run

    def settle(self) -> RowTable:
        """Probe every shape made so far at every count, keep the table, and gate it with rows not seen before."""
        shapes = [(inputs, made) for (inputs, _, _), made in self._made.items()]
        self.table = probe_rows(shapes, max_rows=self.max_rows)
        for inputs, made in shapes if self.invariant else []:
            x = _rows(inputs, count=self.table.sizes[-1], seed=1)
            wanted = made(x)
            for rows in sorted({1, 2, *self.table.sizes}):
                got = self._padded(made, x[:rows])
                check_rows_invariant(wanted=wanted[:rows], got=got, rows=rows, computed_rows=self.table.padded(rows))
        return self.table

    def stable_row_sizes(self, max_rows: int) -> tuple[int, ...]:
        """The row counts to make buckets of: the stable ones below `max_rows`, and what holds `max_rows`.

        Raises:
            ValueError: no count is stable on this backend, or none holds `max_rows`.
        """
        top = self.table.padded(max_rows)
        if top not in self.table.sizes:
            raise ValueError(f"max_rows: {max_rows} is not in 1..{max(self.table.sizes, default=0)} ({self.backend})")
        return tuple(size for size in self.table.sizes if size <= top)

    def _padded(self, made: Linear, x: Tensor) -> Tensor:  # [R, in] -> [R, out]
        rows = x.shape[0]
        spare = self.table.padded(rows) - rows
        return made(F.pad(x, (0, 0, 0, spare)))[:rows] if spare else made(x)


def probe_rows(shapes: Sequence[tuple[int, Linear]], *, max_rows: int) -> RowTable:
    """The counts up to `max_rows` at which every layer (inputs, layer) gives each row its bits, wherever it stands.

    A row's bits are those it has among the first of `max_rows`. Seven rows repeat through each batch, so that each of
    them meets first and last places and every place in a tile.
    """
    counts = [*range(1, min(max_rows, _EVERY_COUNT) + 1), *range(_EVERY_COUNT + _STEP - 4, max_rows + 1, _STEP)]
    stable = set(counts)
    for inputs, layer in shapes:
        batch = _rows(inputs, count=max_rows, seed=0)
        own = _bits(layer(batch)[:_PROBE_ROWS])
        for count in sorted(stable):
            got = _bits(layer(batch[:count].contiguous()))
            if not torch.equal(got, own.repeat(-(-count // _PROBE_ROWS), 1)[:count]):
                stable.discard(count)
    return RowTable(tuple(sorted(stable)), tuple(count for count in counts if count not in stable))


@dataclass(frozen=True, slots=True)
class HalfLoss:
    """What half precision does to weights: values it makes infinite, values it keeps worse than bfloat16 would."""

    overflows: int
    lossy: int
    total: int

    @property
    def acceptable(self) -> bool:
        """True when halves are still the checkpoint's model."""
        return self.overflows == 0 and self.lossy <= MAX_LOSSY_SHARE * self.total


def half_loss(weights: ModelWeights) -> HalfLoss:
    """Count over every matrix that a linear layer would pack (the head included)."""
    overflows = lossy = total = 0
    for matrix in _matrices(weights):
        total += matrix.numel()
        if matrix.dtype == torch.float16:
            continue
        halves = matrix.half()
        error = (halves.double() - matrix.double()).abs()
        # bfloat16 is off by up to 2**-9 of a value. Only below the smallest normal half can a half be worse than that.
        worse = (error > matrix.double().abs() * 2.0**-9) & halves.isfinite()
        overflows += int((~halves.isfinite()).sum())
        lossy += int(worse.sum())
    return HalfLoss(overflows, lossy, total)


def round_to_half(weights: ModelWeights, *, in_place: bool = False) -> ModelWeights:
    """The same model with every packed matrix rounded once; what both engines then compute from.

    `in_place` rounds the layers of `weights` itself, one after the other, so that no second copy of them exists.
    """
    if all(matrix.dtype == torch.float16 for matrix in _matrices(weights)):
        return weights
    layers = weights.layers if in_place else list(weights.layers)
    for index, layer in enumerate(layers):
        layers[index] = _rounded(layer)
    head = _half(weights.lm_head)
    embedding = head if weights.lm_head is weights.embedding else weights.embedding
    return ModelWeights(embedding=embedding, layers=layers, final_norm=weights.final_norm, lm_head=head)


def _rounded(layer: LayerWeights) -> LayerWeights:
    return replace(layer, **{name: _half(getattr(layer, name)) for name in MATRICES})


def _half(matrix: Tensor) -> Tensor:  # [out, in]
    return matrix.half().to(matrix.dtype)


def _matrices(weights: ModelWeights) -> Iterable[Tensor]:
    yield from (getattr(layer, name) for layer in weights.layers for name in MATRICES)
    yield weights.lm_head


def _rows(inputs: int, *, count: int, seed: int) -> Tensor:  # [count, inputs]
    few = torch.randn(_PROBE_ROWS, inputs, generator=torch.Generator().manual_seed(seed))
    return few.repeat(-(-count // _PROBE_ROWS), 1)[:count].contiguous()


def _bits(values: Tensor) -> Tensor:  # [R, N] float32 -> [R, N] int32
    return values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int64)
