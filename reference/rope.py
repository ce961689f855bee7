"""Rotary position embedding: each pair of a head's dimensions turns by an angle proportional to the position.

The layout is the published checkpoints' half-split one: pair i is dimensions i and i + D/2 of a head, not 2i and
2i + 1. `rope_type: llama3` stretches the slow pairs. It knows heads and positions, nothing of layers or caches.
Source: Su et al. 2021 (RoFormer); the Llama 3.1 release for the stretch.

Gates: none. Proof: tests/test_model.py. Story: model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> Tensor:  # [D/2]
    """Radians per position of each pair, fastest first: theta^(-2i/D), stretched when the config says so.

    The default is float32 in every operation, because that is how the published models were trained and are run:
    a frequency that is off by one float32 rounding (6e-8) is off by 2e-4 radians at position 4000, so a "better"
    float64 table would be a different model. float64 is there to judge the float32 table by.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=dtype) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _stretched(frequencies, config.rope_scaling)


def rope_table(
    positions: Tensor,  # [N, T]
    frequencies: Tensor,  # [D/2]
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # cos, sin: [N, 1, T, D]
    """Cosine and sine of every position's angles, computed in float32 (see above), then cast to `dtype`."""
    angles = positions[..., None].float() * frequencies.float()
    both_halves = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # the 1 broadcasts over heads
    return both_halves.cos().to(dtype), both_halves.sin().to(dtype)


def rotate(
    x: Tensor,  # [N, heads, T, D]
    cos: Tensor,  # [N, 1, T, D]
    sin: Tensor,  # [N, 1, T, D]
) -> Tensor:  # [N, heads, T, D]
    """Turn pair (i, i + D/2) of every head: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:  # [D/2] -> [D/2]
    """Llama 3.1's bands by wavelength: short kept, long divided by `factor`, the ones between blended."""
    wavelengths = 2 * math.pi / frequencies  # positions per full turn
    longest_kept = scaling.original_max_positions / scaling.high_freq_factor
    shortest_divided = scaling.original_max_positions / scaling.low_freq_factor
    # 1 at the short edge of the middle band, 0 at its long edge
    keep = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    slow = torch.where(wavelengths > shortest_divided, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, slow)
