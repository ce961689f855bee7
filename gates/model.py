"""Gates on the two ends of a forward pass: what goes in names a token, what comes out is a number.

Gates: this file. Proof: tests/test_model.py. Story: model.
"""

from __future__ import annotations

from torch import Tensor

from gates.core import FULL, gate, require


@gate("model.tokens_in_vocabulary", at=FULL)
def check_tokens_in_vocabulary(*, token_ids: Tensor, vocab_size: int) -> None:  # token_ids: [N, T]
    """Every id, padding included, has an embedding; indexing wraps -1 onto the last one without a word."""
    low, high = int(token_ids.min()), int(token_ids.max())
    require(low >= 0 and high < vocab_size, f"token ids {low}..{high} given, the vocabulary is 0..{vocab_size - 1}")


@gate("model.logits_finite", at=FULL)
def check_logits_finite(*, logits: Tensor) -> None:  # logits: [N, T, V]
    """No NaN or infinity leaves the model; an argmax over NaN is a token like any other and nobody would notice."""
    bad = int((~logits.isfinite()).sum())
    require(bad == 0, f"{bad} of {logits.numel()} logits are not finite numbers")
