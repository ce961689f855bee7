"""Gates on a loaded model: nothing is left uninitialised, nothing has another shape, nothing is not a number.

They stand where loading ends and serving begins. A loader that maps two roles to each other, or forgets one, is
caught by the first; a cast that overflows (bfloat16 to float16), or a damaged file, by the second.

Proof: tests/test_weights.py. Story: model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gates.core import CHEAP, FULL, gate, require


@gate("weights.shaped", at=CHEAP)
def check_weights_shaped(*, held: Mapping[str, tuple[int, ...]], configured: Mapping[str, tuple[int, ...]]) -> None:
    """The model holds exactly the roles that its config names, each of the configured shape."""
    absent = [role for role in configured if role not in held]
    extra = [role for role in held if role not in configured]
    require(not absent and not extra, f"{len(held)} held, {len(configured)} configured; absent {absent}, extra {extra}")
    for role, shape in configured.items():
        require(held[role] == shape, f"{role} held as {held[role]}, configured as {shape}")


@gate("weights.finite", at=FULL)
def check_weights_finite(*, tensors: Mapping[str, torch.Tensor]) -> None:
    """No held number is an infinity or not a number (it would reach every logit)."""
    for role, tensor in tensors.items():
        # A sum over the flags, not the values: a half-precision sum of finite values can overflow itself.
        finite = int(torch.isfinite(tensor).sum())
        require(finite == tensor.numel(), f"{role}: {finite} finite of {tensor.numel()} held")
