"""Exercises of days 1 to 7: the reference engine. What judges it here is the fast one, which shares nothing with it."""

from __future__ import annotations

import torch

from reference.batch import pad_prompts, run_batch
from reference.blocks import BlockTable
from reference.cache import KVCache
from reference.engine import Engine
from reference.model import LlamaModel, rms_norm
from reference.request import Request, SamplingParams
from reference.sampling import draw_token
from reference.stops import StopMatcher
from reference.tokenizer import IncrementalDecoder
from tests.harness import TINY, tiny_engine, tiny_reference, tiny_weights
from tests.lessons.lesson import Lesson
from tests.museum.scenes import OtherTokens, compare
from tests.pages.faults import accented

WANTED = Request((3, 1, 4, 1, 5), SamplingParams(max_tokens=8, temperature=1.2, seed=11, ignore_eos=True), "r")


def both_engines() -> None:
    """One seeded request on both engines."""
    (ours,), (theirs,) = tiny_reference().generate([WANTED]), tiny_engine().generate([WANTED])
    compare(ours, theirs)


def accented_and_stopped() -> None:
    """The word café, one byte a token, and a stop string that arrives in pieces."""
    accented()
    matcher = StopMatcher(("###",))
    sent = [matcher.push(text) for text in ("a#", "b##", "# c")]
    if sent != [("a", None), ("#b", None), ("", "###")]:
        raise OtherTokens(f"the pieces are {sent}")


def small_blocks() -> None:
    """A batch over blocks of two tokens, each answer against its prompt's alone."""
    model = LlamaModel(TINY, tiny_weights(), dtype=torch.float64)
    prompts = [(3, 1, 4), (1, 5, 9, 2, 6)]
    run = run_batch(model, prompts, max_tokens=6, block_size=2)
    alone = [tuple(model.greedy_generate(prompt, max_tokens=6)) for prompt in prompts]
    if list(run.token_ids) != alone:
        raise OtherTokens(f"the batch says {run.token_ids}, alone they are {alone}")


def aborted() -> None:
    """Two requests, the first aborted while it runs: one event ends each, and nothing follows it."""
    engine = tiny_reference()
    for name in ("a", "b"):
        engine.submit(Request((3, 1, 4), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True), name))
    events = engine.step()
    engine.abort("a")
    for _ in range(8):
        events += engine.step()
        engine.abort("a")  # again, when it is over: nothing
        engine.stats()
    said = [(event.request_id, event.finish_reason) for event in events]
    if said != [("a", None), ("a", "abort"), ("b", None), ("b", None), ("b", "length")]:
        raise OtherTokens(f"the engine says {said}")


LESSONS = (
    Lesson(
        1,
        "the model",
        rms_norm,
        "Write RMSNorm: scale each vector to a root mean square of 1, then each element by its weight.",
        "the mean is over the last dimension, and eps goes under the root.",
        both_engines,
        "lockstep",
        draft="return weight * x / (x.pow(2).mean(dim=-1, keepdim=True) + eps)",
    ),
    Lesson(
        2,
        "the tokenizer",
        IncrementalDecoder.push,
        "Give the text that became certain with one more token, so that the pieces join to the whole answer.",
        "`self._utf8` is an incremental decoder: it keeps an unfinished character until its last byte comes.",
        accented_and_stopped,
        "tokenizer.stream",
        draft="""
            data = self._tokenizer.token_bytes(token_id, skip_special_tokens=self._skip)
            return data.decode("utf-8", errors="replace")
        """,
    ),
    Lesson(
        3,
        "the cache",
        KVCache.update,
        "Store this step's keys and values of one layer and return everything that the layer holds.",
        "this is called once a layer. Who counts the step's tokens, if all layers are to write to the same place?",
        both_engines,
        "engine.tokens_cached",
        cut=("if layer == 0:", "if True:"),
    ),
    Lesson(
        4,
        "sampling",
        draw_token,
        "Draw by inverse CDF in id order: the first id whose running mass exceeds u times the whole.",
        "cumsum, compare, first True. u times the mass may round up to all of it; then take the last id with any mass.",
        both_engines,
        "lockstep",
        draft="return int(kept.argmax())",
    ),
    Lesson(
        5,
        "blocks",
        BlockTable.slots,
        "Say where each token of a sequence is: its block times the block size, plus its place in the block.",
        "token t is in the table's block number t // block_size.",
        small_blocks,
        "blocks.mapping_follows_tables",
        draft="return [self.blocks[0] * self.block_size + t for t in range(self.length)]",
    ),
    Lesson(
        6,
        "a static batch",
        pad_prompts,
        "Make the prefill rectangle: ids padded on the right, positions, and the mask of real columns.",
        "a column is real while its position is below its row's length.",
        small_blocks,
        "batch.rows_in_step",
        cut=("positions < torch.tensor([[len(prompt)] for prompt in prompts])", "positions >= 0"),
    ),
    Lesson(
        7,
        "the engine",
        Engine.abort,
        "Drop a request at once, waiting or running. Its event comes with the next step, and nothing after it.",
        "a request that runs, one that waits, one that was aborted already: three cases, one event.",
        aborted,
        "engine.ends_once",
        draft="self._aborted.append(request_id)",
    ),
)
