"""Which device the arguments ask for, refused with its name where it is not there.

Proof: tests/test_gpu.py. Story: app.
"""

from __future__ import annotations

import argparse
import os

import torch

from serve.options import UsageError


def on_gpu(args: argparse.Namespace) -> bool:
    """True when the fast engine is to use the Triton kernels: on a card, or in the interpreter.

    Raises:
        UsageError: the device is not there, or it is not the one for the engine or the dtype asked for.
    """
    interpreted = args.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device: cuda, but torch {torch.__version__} sees no CUDA device here; use cpu")
    if args.device == "cuda" and args.engine == "reference":
        raise UsageError("--device: cuda runs the fast engine alone; the reference runs on cpu")
    if args.dtype in ("float16", "bfloat16") and args.device == "cpu" and not interpreted:
        raise UsageError(f"--dtype: {args.dtype} needs --device cuda; on cpu it is one of float32, float64")
    return args.engine == "fast" and (args.device == "cuda" or interpreted)
