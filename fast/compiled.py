"""The decode forward with its pure pieces compiled, once for each row count of the bucket set.

A compiler that sees a pool written in place copies the whole pool to stay safe, every layer, every step. So the pool
is written and read between compiled regions: norm + q/k/v + rope before it, output projection + feed-forward after
it, and the head. Weights are arguments, since a compiler bakes in what a closure holds and would compile every layer.
Shapes are static and come from the row buckets alone (the width ends in attention), so compilations are bounded by
pieces times row counts. After `ready` a row count that was never compiled runs as it is written, and is counted.

Gates: gates.compiled. Proof: tests/test_compiled.py. Story: compiled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from fast.attention import decode_attention
from fast.cache import BatchedPagedKVCache
from fast.model import Forward, Layer, PlainLinear, attention_inputs, layer_output, rms_norm
from fast.plan import DecodePlan
from gates.compiled import check_compiles_bounded, check_no_compiles_after_ready
from reference.config import ModelConfig

DEFAULT_BACKEND = "inductor"
Piece = Callable[..., Any]


class CountingBackend:
    """A torch.compile backend, by name, that counts what it is asked to compile."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.compiles = 0
        self._compile = torch._dynamo.lookup_backend(name)

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile one graph for inputs like these."""
        self.compiles += 1
        return cast(Callable[..., Any], self._compile(graph, example_inputs))


class CompiledDecode:
    """Runs decode plans through compiled pieces; `row_sizes` is the closed set of row counts they may have.

    Raises:
        ValueError: the linears hide their weights, or `backend` is unknown or cannot compile on this machine.
    """

    NUM_PIECES = 3

    def __init__(self, forward: Forward, *, row_sizes: Sequence[int], backend: str = DEFAULT_BACKEND) -> None:
        linears = [part for layer in forward.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        hidden = [type(part).__name__ for part in (*linears, forward.lm_head) if not isinstance(part, PlainLinear)]
        if hidden:
            raise ValueError(f"compile_decode: True needs linears whose tensors can be arguments, {hidden[0]} has none")
        probe(backend, forward.device)
        self.forward = forward
        self.row_sizes = tuple(row_sizes)
        self.backend = CountingBackend(backend)
        self.compiled_steps = 0
        self.compiles_after_ready = 0
        self.uncompiled: Counter[str] = Counter()
        self.seconds = 0.0  # spent in `warm`
        self._pieces: dict[int, tuple[Piece, Piece, Piece]] = {}
        self._weights = [_weights(layer) for layer in forward.layers]
        self._ready = False

    @property
    def compiles(self) -> int:
        """Graphs compiled so far."""
        return self.backend.compiles

    @torch.inference_mode()
    def decode(self, plan: DecodePlan, cache: BatchedPagedKVCache) -> Tensor:  # [N, V]
        """`Forward.decode`, compiled when the row count is one that was compiled before `ready`."""
        rows = plan.input_ids.shape[0]
        if rows not in self.row_sizes or (self._ready and rows not in self._pieces):
            self.uncompiled["unseen row count"] += 1
            return self.forward.decode(plan, cache)
        before = self.compiles
        logits = self._run(plan, cache, self._pieces_for(rows))
        self.compiled_steps += 1
        self.compiles_after_ready += (self.compiles - before) * self._ready
        check_no_compiles_after_ready(compiles_after_ready=self.compiles_after_ready)
        check_compiles_bounded(compiles=self.compiles, pieces=self.NUM_PIECES, row_sizes=tuple(self._pieces))
        return logits

    def warm(self, plans: Callable[[int], DecodePlan], cache: BatchedPagedKVCache) -> None:
        """Compile every row count, over the plan of nothing but padding that `plans` makes for it."""
        start = time.perf_counter()
        for rows in self.row_sizes:
            self.decode(plans(rows), cache)
        self.seconds += time.perf_counter() - start

    def ready(self) -> None:
        """From here on a client waits for every step: nothing is compiled any more."""
        self._ready = True

    def render(self) -> str:
        """The boot line."""
        return (
            f"compiled: {self.compiles} graphs by {self.backend.name}, {self.NUM_PIECES} pieces x "
            f"{len(self._pieces)} row counts, in {self.seconds:.1f} s"
        )

    def _run(
        self, plan: DecodePlan, cache: BatchedPagedKVCache, pieces: tuple[Piece, Piece, Piece]
    ) -> Tensor:  # [N, V]
        forward = self.forward
        inputs, output, head = pieces
        cos, sin = forward.rope(plan.positions)
        hidden = forward.embedding[plan.input_ids]
        for index, (before, after) in enumerate(self._weights):
            q, k, v = inputs(hidden, cos, sin, *before)
            cache.write(index, k, v, plan.write_slots)
            pools = cache.k[index], cache.v[index]
            attended = decode_attention(q, *pools, plan.slot_mapping, plan.context_lens, forward.scale)
            hidden = output(hidden, attended, *after)
        lm_head = cast(PlainLinear, forward.lm_head)
        return cast(Tensor, head(hidden, forward.final_norm, lm_head.weight, lm_head.bias))

    def _pieces_for(self, rows: int) -> tuple[Piece, Piece, Piece]:
        if rows not in self._pieces:
            inputs, output, head = (
                torch.compile(_own(piece, f"{rows}_rows"), backend=self.backend, dynamic=False, fullgraph=True)
                for piece in _pieces(self.forward.config)
            )
            self._pieces[rows] = inputs, output, head
        return self._pieces[rows]


def probe(backend: str, device: torch.device) -> None:
    """Compile one addition, the cheapest way to learn that a compiler or a header is missing.

    Raises:
        ValueError: naming `compile_decode`, with the compiler's own first lines.
    """
    # A constant that no earlier run had, so that no cache answers for a compiler that is gone.
    added = float(time.time_ns() % 10**9)
    try:
        compiled = torch.compile(_own(lambda x: x + added, "probe"), backend=backend, dynamic=False, fullgraph=True)
        compiled(torch.zeros(8, device=device))
    except Exception as broken:  # each backend has errors of its own
        reason = " ".join(str(broken).split("\n")[:2])
        raise ValueError(
            f"compile_decode: True needs a working torch.compile backend {backend!r} (inductor needs a C++ compiler: "
            f"install g++ or clang, or set CXX); it says: {reason}"
        ) from broken


def _weights(layer: Layer) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """A layer's tensors in the order in which the two pieces take them."""
    qkv, output = cast(PlainLinear, layer.qkv), cast(PlainLinear, layer.output)
    gate_up, down = cast(PlainLinear, layer.gate_up), cast(PlainLinear, layer.down)
    before = (layer.input_norm, qkv.weight, qkv.bias, layer.q_norm, layer.k_norm)
    after = (output.weight, output.bias, layer.post_norm, gate_up.weight, gate_up.bias, down.weight, down.bias)
    return before, after


def _pieces(config: ModelConfig) -> tuple[Piece, Piece, Piece]:
    """The three regions as functions of tensors alone; what else they hold is the same for every layer."""
    eps = config.rms_norm_eps

    def inputs(
        hidden: Tensor,  # [N, M]
        cos: Tensor,  # [N, 1, D/2]
        sin: Tensor,  # [N, 1, D/2]
        norm: Tensor,  # [M]
        weight: Tensor,  # [(H + 2K) * D, M]
        bias: Tensor | None,
        q_norm: Tensor | None,  # [D]
        k_norm: Tensor | None,  # [D]
    ) -> tuple[Tensor, Tensor, Tensor]:  # [N, H, D], [N, K, D], [N, K, D]
        qkv = PlainLinear(weight, bias)
        return attention_inputs(hidden, cos, sin, norm=norm, qkv=qkv, q_norm=q_norm, k_norm=k_norm, config=config)

    def output(
        hidden: Tensor,  # [N, M]
        attended: Tensor,  # [N, H, D]
        weight: Tensor,  # [M, H * D]
        bias: Tensor | None,
        norm: Tensor,  # [M]
        gate_up_weight: Tensor,  # [2F, M]
        gate_up_bias: Tensor | None,
        down_weight: Tensor,  # [M, F]
        down_bias: Tensor | None,
    ) -> Tensor:  # [N, M]
        return layer_output(
            hidden,
            attended,
            output=PlainLinear(weight, bias),
            norm=norm,
            gate_up=PlainLinear(gate_up_weight, gate_up_bias),
            down=PlainLinear(down_weight, down_bias),
            eps=eps,
        )

    def head(hidden: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # [N, M] -> [N, V]
        return PlainLinear(weight, bias)(rms_norm(hidden, norm, eps))

    return inputs, output, head


def _own(piece: Piece, word: str) -> Piece:
    """The same function over a code object of its own.

    Compilations are kept, searched and limited (8 by default) by code object: one each keeps a call's search at one
    entry, and two engines of a process out of each other's way.
    """
    function = cast(FunctionType, piece)
    code = function.__code__.replace(co_name=f"{function.__name__.strip('<>')}_{word}")
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
