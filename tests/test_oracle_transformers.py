"""The reference against transformers, an implementation that nobody here wrote: logits, tokens, filters, ids.

Tiny random checkpoints that transformers wrote are compared in float64, where only a different formula makes a
difference; the real weights are compared in float32, token for token. For GGUF tokenizers it is no oracle: it
does not read `tokenizer.ggml.pre`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from reference.cache import KVCache
from reference.config import ModelConfig
from reference.engine import Engine
from reference.model import LlamaModel
from reference.request import Request, SamplingParams
from reference.sampling import keep, penalize
from reference.tokenizer import Tokenizer
from reference.weights import load_weights
from serve.models import LoadedModel, load_model, model_path
from tests.checkpoints import SHAPES, write_checkpoint
from tests.tokenizer_samples import TEXTS

REAL = "smollm2-135m-instruct"
STEPS = 64
# Two float64 runs of one formula differ by some 1e-14 here; float32 anywhere, or another formula, by 1e-7 and more.
FLOAT64_TOLERANCE = 1e-12


class StaysInFloat64(TorchFunctionMode):
    """Lifts transformers' own casts to float32 (in its norms), so that a float64 model computes in float64.

    Its RoPE table stays in float32: that is part of the definition, and it casts by `.float()`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and args[1:] == (torch.float32,) and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def their_logits(theirs: Any, token_ids: list[int]) -> torch.Tensor:  # [T, V]
    with torch.no_grad(), StaysInFloat64():
        return theirs(torch.tensor([token_ids])).logits[0]


def our_logits(model: LlamaModel, token_ids: list[int]) -> torch.Tensor:  # [T, V]
    cache = KVCache(model.config, max_tokens=len(token_ids), dtype=model.dtype)
    return model.forward(torch.tensor([token_ids]), torch.arange(len(token_ids))[None], cache)[0]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:  # [T, V] each -> [T]
    """At each position, the largest difference over the largest logit."""
    assert ours.dtype == theirs.dtype == torch.float64
    return (ours - theirs).abs().amax(dim=-1) / theirs.abs().amax(dim=-1)


def load_tiny(folder: Path) -> LlamaModel:
    config = ModelConfig.from_dir(folder)
    return LlamaModel(config, load_weights(folder, config), dtype=torch.float64)


def some_tokens(count: int, vocab_size: int) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def greedy(theirs: Any, prompt_ids: list[int]) -> list[int]:
    """64 tokens of transformers' own `generate`, with its K/V cache; no token ends it."""
    theirs.generation_config.eos_token_id = None
    prompt = torch.tensor([prompt_ids])
    with StaysInFloat64():
        output = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=STEPS, do_sample=False)
    return output[0, len(prompt_ids) :].tolist()


def our_greedy(engine: Engine, prompt_ids: list[int]) -> list[int]:
    params = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True)
    return engine.generate([Request(prompt_ids, params)])[0].token_ids


def assert_same_tokens(ours: list[int], theirs: list[int], gaps: Callable[[list[int]], dict[str, float]]) -> None:
    """Equal tokens, or the first difference with the gap between the two best logits on either side.

    `gaps` computes them after the answer's first tokens, which both sides agree on.
    """
    if ours == theirs:
        return
    assert len(ours) == len(theirs), f"{len(ours)} tokens here, {len(theirs)} there"
    step = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    pytest.fail(f"step {step}: token {ours[step]} here, {theirs[step]} there; top-two gaps {gaps(ours[:step])}")


def top_two_gap(logits: torch.Tensor) -> float:  # [V]
    best, second = logits.double().topk(2).values.tolist()
    return best - second


# ---- holds: every family and shape, in float64 ------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [None, 10_000], ids=["single", "sharded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers_at_every_position(tmp_path: Path, shape: str, max_shard_bytes: int | None):
    family, overrides = SHAPES[shape]
    theirs = write_checkpoint(tmp_path, family, dtype=torch.float64, max_shard_bytes=max_shard_bytes, **overrides)
    ours = load_tiny(tmp_path)
    tokens = some_tokens(128, ours.config.vocab_size)
    assert relative_error(our_logits(ours, tokens), their_logits(theirs, tokens)).max() < FLOAT64_TOLERANCE


@pytest.mark.parametrize("prompt_tokens", [1, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, shape: str, prompt_tokens: int):
    family, overrides = SHAPES[shape]
    theirs = write_checkpoint(tmp_path, family, dtype=torch.float64, **overrides)
    config = ModelConfig.from_dir(tmp_path)
    engine = Engine(config, load_weights(tmp_path, config), max_model_len=128, dtype=torch.float64)
    prompt = some_tokens(prompt_tokens, config.vocab_size)

    def gaps(answer: list[int]) -> dict[str, float]:
        tokens = [*prompt, *answer]
        here, there = our_logits(engine.model, tokens)[-1], their_logits(theirs, tokens)[-1]
        return {"here": top_two_gap(here), "transformers": top_two_gap(there)}

    assert_same_tokens(our_greedy(engine, prompt), greedy(theirs, prompt), gaps)


@pytest.mark.parametrize("position", [1, 100, 4000])
def test_llama3_rope_equals_transformers_far_from_the_start(tmp_path: Path, position: int):
    family, overrides = SHAPES["llama-rope3"]
    theirs = write_checkpoint(tmp_path, family, dtype=torch.float64, **overrides)
    ours = load_tiny(tmp_path)
    assert ours.config.rope_scaling is not None
    tokens = some_tokens(position + 1, ours.config.vocab_size)
    expected = their_logits(theirs, tokens)[-1:]
    assert relative_error(our_logits(ours, tokens)[-1:], expected).max() < FLOAT64_TOLERANCE

    # The stretch is what makes them equal: without it the far positions are plainly off.
    plain = LlamaModel(replace(ours.config, rope_scaling=None), ours.weights, dtype=torch.float64)
    if position == 4000:
        assert relative_error(our_logits(plain, tokens)[-1:], expected).max() > 1e-3


# ---- holds: the filters of sampling -----------------------------------------------------------------------------

SCORES = st.lists(st.integers(-64, 64), min_size=2, max_size=20, unique=True).map(  # no ties: it breaks them elsewhere
    lambda values: torch.tensor(values, dtype=torch.float64) / 8
)


def kept_here(scores: torch.Tensor, **fields: Any) -> list[bool]:
    return (keep(scores.softmax(0), SamplingParams(**fields)) > 0).tolist()


def kept_there(warper: Any, scores: torch.Tensor) -> list[bool]:
    return torch.isfinite(warper(torch.zeros((1, 1), dtype=torch.long), scores[None].clone())[0]).tolist()


@given(SCORES, st.integers(1, 22))
def test_top_k_keeps_what_transformers_keeps(scores: torch.Tensor, top_k: int):
    assert kept_here(scores, top_k=top_k) == kept_there(TopKLogitsWarper(top_k), scores)


@given(SCORES, st.floats(0.01, 0.99))
def test_top_p_keeps_what_transformers_keeps(scores: torch.Tensor, top_p: float):
    assert kept_here(scores, top_p=top_p) == kept_there(TopPLogitsWarper(top_p), scores)


@given(SCORES, st.floats(0.01, 0.99))
def test_min_p_keeps_what_transformers_keeps(scores: torch.Tensor, min_p: float):
    assert kept_here(scores, min_p=min_p) == kept_there(MinPLogitsWarper(min_p), scores)


@given(SCORES, st.floats(0.1, 10), st.lists(st.integers(0, 19), min_size=1, max_size=9))
def test_repetition_penalty_equals_that_of_transformers(scores: torch.Tensor, penalty: float, said: list[int]):
    ids = [token % len(scores) for token in said]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), scores[None].clone())[0]
    params = SamplingParams(repetition_penalty=penalty)
    assert torch.equal(penalize(scores, params, prompt_ids=ids[:1], output_ids=ids[1:]), theirs)


# ---- holds: the real weights, in float32 ------------------------------------------------------------------------

LONG_TEXT = " ".join(
    f"Station {n} reported {n * n % 97} mm of rain and wind from the {'north' if n % 3 else 'sea'}." for n in range(60)
)

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Is ice warm? 🧊"}],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another one, please.\n\n  With   odd spacing\t!"},
    ],
    [{"role": "user", "content": "Write a haiku about the sea — на русском, или 日本語で."}],
    [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
]

PLAIN = {
    "english": "The history of the lighthouse begins with",
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    "code-c": "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++)\n",
    "json": '{"name": "Ada", "born": 1815, "works": [',
    "shell": "$ ls -la | grep '\\.py$' | wc -l\n",
    "digits": "3.14159265358979 1, 1, 2, 3, 5, 8, 13, 21,",
    "russian": "Однажды в студёную зимнюю пору",
    "chinese": "今天天气很好,我们去",
    "arabic": "كان يا ما كان في قديم الزمان ٣٤٥",
    "hindi": "एक समय की बात है",
    "korean": "옛날 옛적에 호랑이가",
    "emoji": "😀😀 👩‍👩‍👧‍👦 🇨🇿 🧪",
    "spaces": "   \n\n\t  indented \u00a0",
    "german": "Zwölf Boxkämpfer jagen Viktor quer über den großen",
}
assert len(PLAIN) + len(CHATS) - 1 + 2 == 20  # the empty chat is left to the tokenizer; one token and 600 join


@pytest.fixture(scope="module")
def real() -> LoadedModel:
    """The default model, float32. Without it these tests fail: they are not optional."""
    return load_model(REAL, dtype=torch.float32)


@pytest.fixture(scope="module")
def our_tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(model_path(REAL))


@pytest.fixture(scope="module")
def their_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path(REAL))


@pytest.fixture(scope="module")
def their_model() -> Iterator[Any]:
    theirs = LlamaForCausalLM.from_pretrained(model_path(REAL), dtype=torch.float32, attn_implementation="sdpa")
    theirs.generation_config.pad_token_id = 2
    yield theirs.eval()
    del theirs


def real_prompts() -> dict[str, Callable[[Any], list[int]]]:
    """Name -> what makes the ids from transformers' own tokenizer."""

    def chat_ids(messages: list[dict[str, str]]) -> Callable[[Any], list[int]]:
        return lambda tokenizer: their_chat_ids(tokenizer, messages)

    def text_ids(text: str, count: int | None = None) -> Callable[[Any], list[int]]:
        return lambda tokenizer: tokenizer(text)["input_ids"][:count]

    chats = {f"chat-{i}": chat_ids(messages) for i, messages in enumerate(CHATS[:4])}
    plain = {name: text_ids(text) for name, text in PLAIN.items()}
    return chats | plain | {"one-token": text_ids("The", 1), "600-tokens": text_ids(LONG_TEXT, 600)}


def their_chat_ids(tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=True
    )
    return list(encoded["input_ids"])


@pytest.mark.model
@pytest.mark.parametrize("name", real_prompts())
def test_real_greedy_tokens_equal_those_of_transformers(
    name: str, real: LoadedModel, their_model: Any, their_tokenizer: Any
):
    prompt = real_prompts()[name](their_tokenizer)
    assert len(prompt) == {"one-token": 1, "600-tokens": 600}.get(name, len(prompt))
    engine = Engine(real.config, real.weights)

    def gaps(answer: list[int]) -> dict[str, float]:
        tokens = [*prompt, *answer]
        with torch.no_grad():
            there = their_model(torch.tensor([tokens])).logits[0, -1]
        return {"here": top_two_gap(our_logits(engine.model, tokens)[-1]), "transformers": top_two_gap(there)}

    assert_same_tokens(our_greedy(engine, prompt), greedy(their_model, prompt), gaps)


@pytest.mark.model
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
def test_real_chat_ids_equal_those_of_transformers(
    messages: list[dict[str, str]], add_generation_prompt: bool, our_tokenizer: Tokenizer, their_tokenizer: Any
):
    expected = their_chat_ids(their_tokenizer, messages, add_generation_prompt=add_generation_prompt)
    ours = our_tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
    assert ours == expected


def wide_sample() -> list[str]:
    """Texts in many scripts, every letter and digit of Unicode's first planes in runs, whitespace, code, specials."""
    letters = "".join(chr(c) for c in range(0x20, 0x30000) if chr(c).isprintable())
    runs = [letters[i : i + 400] for i in range(0, len(letters), 6400)]  # one run in sixteen
    digits = "".join(chr(c) for c in range(0x30, 0x1FBFA) if chr(c).isnumeric())
    spaces = [
        "\u2003".join(" " * n + "\n" * (n % 3) + "\t" * (n % 4) + "x" for n in range(1, 20)),
        " " * 50,
        "\r\n" * 9,
    ]
    specials = ["<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<|im_start|", "a<repo_name>b"]
    source = Path(__file__).read_text("utf-8")
    return [*TEXTS, *PLAIN.values(), *runs, digits, *spaces, *specials, LONG_TEXT, source]


@pytest.mark.model
def test_real_token_ids_equal_those_of_transformers(our_tokenizer: Tokenizer, their_tokenizer: Any):
    sample = wide_sample()
    assert len(sample) > 60
    for text in sample:
        assert our_tokenizer.encode(text) == their_tokenizer(text)["input_ids"], text[:80]
    assert our_tokenizer.encode("٣٤٥ ½") == [164, 113, 164, 114, 164, 115, 216, 16738]


# ---- any order --------------------------------------------------------------------------------------------------


@pytest.mark.model
@given(st.text(max_size=40))
def test_real_token_ids_of_any_text_equal_those_of_transformers(
    our_tokenizer: Tokenizer, their_tokenizer: Any, text: str
):
    assert our_tokenizer.encode(text) == their_tokenizer(text)["input_ids"]
