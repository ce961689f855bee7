"""The same model in transformers, on the same device and in the same run: eager, and compiled with a static cache.

Both sides hold the same seeded weights, and must agree on the logits of a prompt before either is timed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fast.model import Chunk
from reference.config import ModelConfig
from reference.request import Request, SamplingParams
from reference.weights import ModelWeights
from tests.bench.gpu_models import MODELS, engine, seeded_weights

PROMPT, NEW = 32, 64  # tokens
NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}


def oracle(config: ModelConfig, weights: ModelWeights, *, dtype: torch.dtype, device: str) -> Any:
    """transformers' Llama of these sizes, holding these weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor}
        rope |= {"high_freq_factor": scaling.high_freq_factor}
        rope |= {"original_max_position_embeddings": scaling.original_max_positions}
    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device(device):
        model = LlamaForCausalLM(theirs)
    for parameter in model.parameters():  # not its buffers: rotary frequencies are float32 whatever the weights are
        parameter.data = parameter.data.to(dtype)
    model.load_state_dict(named(weights), strict=False)
    return model.eval()


def named(weights: ModelWeights) -> dict[str, Tensor]:
    """The weights under the names that transformers gives them."""
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    state["lm_head.weight"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        for ours, theirs in NAMES.items():
            state[f"model.layers.{index}.{theirs}.weight"] = getattr(layer, ours)
    return state


def compared(clock: Any) -> Iterator[dict[str, Any]]:
    """Lines of tokens a second, each of one model, batch and side; `generate` end to end, prompts of equal length."""
    for name in ("smollm2-135m", "llama-3.2-1b"):
        if clock.left < 60:
            yield {"part": "transformers", "model": name, "left_out": "no time was left"}
            continue
        sides = Sides(name, rows=32, new=NEW, dtype=torch.bfloat16, device="cuda")
        for batch in (1, 8, 32):
            yield from sides.timed(batch, static=clock.left > 45)


class Sides:
    """One model on both sides, with equal weights, and logits that were compared."""

    def __init__(
        self, name: str, *, rows: int, new: int, dtype: torch.dtype, device: str, prompt: int = PROMPT
    ) -> None:
        self.name, self.new, self.device = name, new, device
        config = MODELS[name]
        self.theirs = oracle(config, seeded_weights(config, dtype=dtype, device=device), dtype=dtype, device=device)
        switches = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True, "compact_rows": True}
        sizes = {"rows": rows, "tokens": prompt + new}
        self.ours = engine(name, dtype=dtype, device=device, **sizes, triton=True, **switches)
        self.prompts = torch.arange(rows * prompt).view(-1, prompt) * 7 % (config.vocab_size - 3) + 3
        self.agree()
        self.ours.warm_decode()

    def agree(self) -> None:
        """The logits of one prompt on both sides, before anybody is timed."""
        prompt = self.prompts[0]
        with torch.inference_mode():
            wanted = self.theirs(prompt[None].to(self.device)).logits[0, -1].float()
        chunk = Chunk(0, tuple(prompt.tolist()), tuple(range(len(prompt))))
        got = self.ours.forward.prefill([chunk], self.ours.cache)[0].float()
        close = torch.nn.functional.cosine_similarity(got, wanted, dim=0)
        assert close > 0.99, f"the two sides' logits have a cosine of {float(close):.4f}: not the same model"

    def timed(self, batch: int, *, static: bool) -> Iterator[dict[str, Any]]:
        """Tokens a second of each side; `static` adds the compiled cache."""
        sides: dict[str, Callable[[], object]] = {
            "ours, graphs": lambda: self.run_ours(batch),
            "transformers eager": lambda: self.run_theirs(batch),
        }
        if static:
            sides["transformers static"] = lambda: self.run_theirs(batch, static=True)
        for arm, call in sides.items():
            rate = batch * self.new / _seconds(call, rounds=2, device=self.device)
            yield {"part": "transformers", "model": self.name, "arm": arm, "rows": batch, "tokens_per_s": rate}

    def run_ours(self, batch: int) -> None:
        """Greedy, to the same length."""
        params = SamplingParams(self.new, temperature=0.0, ignore_eos=True)
        done = self.ours.generate(
            [Request(row, params, f"r{i}") for i, row in enumerate(self.prompts[:batch].tolist())]
        )
        assert all(len(one.token_ids) == self.new for one in done)

    def run_theirs(self, batch: int, *, static: bool = False) -> None:
        """Greedy `generate`; with a static cache transformers compiles the decode step itself."""
        ids, how = self.prompts[:batch].to(self.device), {"cache_implementation": "static"} if static else {}
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            lengths = {"max_new_tokens": self.new, "min_new_tokens": self.new}
            out = self.theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **how)
        assert out.shape[1] == ids.shape[1] + self.new


def _seconds(call: Callable[[], object], *, rounds: int, device: str) -> float:
    """The quickest of some calls after one that warms up (and compiles); a call ends with its tokens on the host."""
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
