"""Compile every Triton kernel for cards that are not here, and print what each would take: one JSON line a kernel.

Run: `python -m tests.gpu_compile sm_80 sm_90 gfx942` (and `--spilling`, for one that does). It needs no GPU: Triton
brings the assemblers and `cuobjdump`. It is a process of its own, since kernels that are interpreted cannot be
compiled. What the kernels are compiled for comes from the functions that launch them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fast.kernels.gpu import attend, decode, matmul, prefill, rope, rowwise

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
AMD_COUNTS = "vgpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size"
INTEGERS = {"table": "*i64", "lengths": "*i64", "tasks": "*i64", "positions": "*i64", "slots": "*i64"}
INTEGERS |= {"programs": "i32", "splits": "i32", "table_stride": "i64", "tokens": "i32"}
FLOATS = {"scale_log2": "fp32", "eps": "fp32", "cos": "*fp32", "sin": "*fp32"}
FLOATS |= dict.fromkeys(("acc_out", "peaks_out", "totals_out", "acc_in", "peaks", "totals"), "*fp32")


@dataclass(frozen=True)
class Build:
    """One kernel as one model would launch it."""

    name: str
    kernel: Any
    element: str  # of weights, activations and K/V
    constants: dict[str, Any]
    options: dict[str, Any]


def builds(*, heads: int, kv_heads: int, dim: int, hidden: int, wide: int, element: str) -> Iterator[Build]:
    """Every kernel for one model's sizes."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
    split = attend.SPLIT_TOKENS
    by_slot = attend.constants(**sizes, split=split, block_size=None)
    by_block = attend.constants(**sizes, split=split, block_size=16)
    group = {"M": decode.group_tile(heads, kv_heads)}
    attention = attend.ATTENTION_OPTIONS
    yield Build("decode by slots", decode._split_kernel, element, by_slot | group, attention)
    yield Build("decode by blocks", decode._split_kernel, element, by_block | group, attention)
    fixed = {name: by_slot[name] for name in ("HEADS", "D", "D_TILE", "SPLIT")}
    yield Build("combine", decode._combine_kernel, element, fixed, decode.COMBINE_OPTIONS)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[element]
    for tile in sorted({prefill.query_tile(dtype, invariant=invariant) for invariant in (True, False)}):
        tiled = by_slot | {"M": tile}
        yield Build(f"prefill of {tile}", prefill._prefill_kernel, element, tiled, prefill.options(tile))
    turned = rope.constants(**sizes, normed=True)
    yield Build("rope", rope._rope_kernel, element, turned, rope.ROPE_OPTIONS)
    normed = rowwise.norm_constants(hidden, added=True)
    yield Build("norm", rowwise._norm_kernel, element, normed, rowwise.norm_options(hidden))
    gated = {"SIZE": wide, "TILE": rowwise.GATE_TILE}
    yield Build("gate", rowwise._gate_kernel, element, gated, rowwise.GATE_OPTIONS)
    for name, columns in (("narrow", hidden), ("wide", 2 * wide)):
        fixed = matmul.constants(columns=columns, depth=hidden, biased=True, element_bytes=dtype.itemsize)
        yield Build(f"matmul {name}", matmul._matmul_kernel, element, fixed, matmul.MATMUL_OPTIONS)


def compiled(build: Build, target: GPUTarget) -> Any:
    """The kernel for a target, arguments specialised as a launch specialises them."""
    kernel, signature, attrs = build.kernel, {}, {}
    varies = set(decode.SPLIT_VARIES) | {"tokens"}
    for index, name in enumerate(kernel.arg_names):
        if name in build.constants:
            signature[name] = "constexpr"
            continue
        signature[name] = INTEGERS.get(name) or FLOATS.get(name) or f"*{build.element}"
        if signature[name][0] == "*" and name not in INTEGERS and name not in varies:
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=build.constants, attrs=attrs)
    return triton.compile(source, target=target, options=build.options)


def taken(build: Build, target: GPUTarget) -> dict[str, Any]:
    """Shared memory, registers, and bytes that spilled out of them, of one kernel on one target.

    For NVIDIA also the bytes of each of its asynchronous copies, and the matrix instructions that it is made of.
    """
    kernel = compiled(build, target)
    facts = {"kernel": build.name, "element": build.element, "shared": kernel.metadata.shared}
    if "cubin" in kernel.asm:
        text = kernel.asm["ptx"]
        copies = {int(size, 0) for size in re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?, (0x\w+|\d+)", text)}
        products = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(m\d+n\d+k\d+)", text))
        facts |= {"copies": sorted(copies), "products": sorted(products)}
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            told = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True)
        counts = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told.stdout)}
        return facts | {"registers": counts["REG"], "spilled": counts["STACK"] + counts["LOCAL"]}
    text = kernel.asm["amdgcn"]
    counts = {name: int(count) for name, count in re.findall(rf"\.({AMD_COUNTS}):\s+(\d+)", text)}
    return facts | {"registers": counts.pop("vgpr_count"), "spilled": sum(counts.values())}


LLAMA = {"heads": 32, "kv_heads": 8, "dim": 128, "hidden": 4096, "wide": 14336, "element": "bf16"}
SMOLLM = {"heads": 9, "kv_heads": 3, "dim": 64, "hidden": 576, "wide": 1536, "element": "fp32"}
PRODUCTS = ("decode by slots", "prefill of 16", "matmul narrow")  # what float32 compiles into something else


def spilling() -> Build:
    """A kernel that cannot keep what it needs in registers, to see that this is seen."""
    sizes = {name: SMOLLM[name] for name in ("heads", "kv_heads", "dim")}
    fixed = attend.constants(**sizes, split=attend.SPLIT_TOKENS, block_size=None) | {"M": prefill.LARGE_TILE}
    return Build("prefill that spills", prefill._prefill_kernel, "fp32", fixed, attend.ATTENTION_OPTIONS)


def main() -> None:
    """Every kernel at Llama-3.1-8B's sizes, and SmolLM2-135M's float32 products, for the targets that are named."""
    wanted = [*builds(**LLAMA), *(build for build in builds(**SMOLLM) if build.name in PRODUCTS)]
    for name in sys.argv[1:]:
        for build in wanted if name in TARGETS else [spilling()]:
            target = name if name in TARGETS else "sm_90"
            print(json.dumps({"target": target} | taken(build, TARGETS[target])), flush=True)


if __name__ == "__main__":
    main()
