"""The fault of each page: one edit of the source, a workload that passes it, and the gate that fires with its words.

Most are exhibits of the museum; the others are made here, for the whiteboard engine and the server. `run` puts a fault
in place and tells what stopped it; `python -m tests.pages break NAME` prints that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fast.chunk import share_budget
from reference.attention import dense_attention
from reference.batch import run_batch
from reference.blocks import BatchedPagedKVCache
from reference.cache import KVCache
from reference.engine import Engine as ReferenceEngine
from reference.model import LlamaModel
from reference.request import Event, Request, SamplingParams
from reference.tokenizer import ByteTokenizer, IncrementalDecoder
from serve.answer import Answer
from tests.harness import TINY, tiny_reference, tiny_weights
from tests.museum.catalogue import EXHIBITS
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Caught, Edit, applied, watch
from tests.pages import runs
from tests.pages.catalogue import diff

ADDRESS = re.compile(r"0x[0-9a-f]+")
WITHOUT = {
    LOCKSTEP: "Without gates every step runs, and an answer differs from the one the reference gives",
    HARMLESS: "Without gates this run ends with the right tokens, and the fault waits for another one",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One edit or more, and the workload in which it shows."""

    edits: tuple[Edit, ...]
    scene: Callable[[], object]
    without: str = ""  # what happens when no gate is on; empty: what the museum says of it


def padded_left() -> None:
    """Two prompts in one rectangle, padded on the left: the first query of the short one may see no key."""
    model = LlamaModel(TINY, tiny_weights(), dtype=torch.float64)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])
    cache = KVCache(TINY, max_tokens=8, dtype=torch.float64, batch_size=2)
    model.forward(torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), positions, cache, attention_mask=mask)


def accented() -> None:
    """The word café, one byte a token."""
    answer = Answer(ByteTokenizer(), SamplingParams(max_tokens=5))
    data = "café".encode()
    for index, byte in enumerate(data):
        answer.push(Event("a", byte, "length" if index == len(data) - 1 else None))


def hash_end() -> None:
    """An answer that ends in the beginning of a stop string that does not come."""
    answer = Answer(ByteTokenizer(), SamplingParams(max_tokens=2, stop=("###",)))
    answer.push(Event("a", ord("a"), None))
    answer.push(Event("a", ord("#"), "length"))


def alone() -> None:
    """One request on the reference engine, to its end."""
    tiny_reference().generate([Request((3, 1, 4), SamplingParams(max_tokens=4, seed=1, ignore_eos=True), "a")])


def ragged() -> None:
    """A static batch of prompts of 3 and 5 tokens."""
    run_batch(LlamaModel(TINY, tiny_weights(), dtype=torch.float64), [(3, 1, 4), (1, 5, 9, 2, 6)], max_tokens=3)


OWN: dict[str, Fault] = {
    "model": Fault(
        (Edit(dense_attention, "torch.finfo(q.dtype).min", 'float("-inf")'),),
        padded_left,
        "Without gates the call returns; an argmax over NaN is a token id like any other",
    ),
    "tokenizer": Fault(
        (Edit(IncrementalDecoder.push, "self._utf8.decode(data)", 'data.decode(errors="replace")'),),
        accented,
        "Without gates the client reads two replacement characters where the answer has one letter",
    ),
    "cache": Fault(
        (Edit(ReferenceEngine._forward, "torch.arange(start, len(tokens))", "torch.arange(len(tokens) - start)"),),
        alone,
        "Without gates every later token is rotated as if it stood near the start, and the text stays fluent",
    ),
    "sampling": Fault(
        (Edit(ReferenceEngine._advance, "position=known", "position=len(sequence.output_ids)"),),
        alone,
        "Without gates the answer is a good sample, and not the one that this seed names",
    ),
    "blocks": Fault(
        (Edit(BatchedPagedKVCache.slot_mapping, "[PAD_SLOT]", "[-1]"),),
        ragged,
        "Without gates nothing happens: torch reads the last slot of the pool, and the mask hides what it read",
    ),
    "batch": Fault(
        (
            Edit(
                BatchedPagedKVCache.write,
                "    if layer == 0:\n",
                "    check_prefill_lands_empty(seq_lens=self.seq_lens if valid is not None else [])\n"
                "    if layer == 0:\n",
            ),
        ),
        ragged,
        "Here the gate is right and its place is wrong: it fires on layer 1 of a good prefill",
    ),
    "engine": Fault(
        (Edit(inspect.unwrap(ReferenceEngine.step), "del self._open[event.request_id]", "pass"),),
        alone,
        "Without gates the engine says for ever that it has work, and its owner steps it for ever",
    ),
}
OWN |= {
    "chunk": Fault(
        (Edit(share_budget, "budget - budget // 2)", "budget)"),),
        runs.chunk,
        "Without gates every token is right, and the short prompt waits until the long one is computed",
    ),
    "stream": Fault(
        (Edit(Answer.push, "safe += tail + self._matcher.flush()", "safe += tail"),),
        hash_end,
        "Without gates the client reads `a` where the answer is `a#`",
    ),
}
FROM_THE_MUSEUM = {
    "scheduler": "the preempted go back to the front",
    "plan": "each row has its own position",
    "slots": "a held plan's window is not rewritten",
    "buckets": "a padded row does not write to slot 0",
    "inputs": "nothing of a larger batch stands behind a smaller one",
    "capture": "a launch bakes in no host number that the key does not hold",
    "warmup": "a warm batch has no rows",
    "wiring": "nothing is recorded in front of a client",
    "compact": "a move copies the whole live prefix",
    "attention": "a padded row computes finite numbers",
    "prefix": "a hash is not a prefix",
    "lockstep": "a penalty sees every token of the answer",
}


def faults() -> dict[str, Fault]:
    """Every page's fault, by the page's subject."""
    exhibits = {exhibit.name: exhibit for exhibit in EXHIBITS}
    return OWN | {page: Fault(exhibits[n].edits, exhibits[n].scene) for page, n in FROM_THE_MUSEUM.items()}


def run(fault: Fault, level: str) -> Caught:
    """The workload with the fault in place, at a level of the gates."""
    with applied(fault.edits):
        return watch(fault.scene, level)


def told(name: str) -> str:
    """What `python -m tests.pages break NAME` prints; addresses, which change from run to run, are left out."""
    caught = run(faults()[name], "full")
    message = ADDRESS.sub("0x...", caught.message)
    return message if message.startswith("gate ") else f"{caught.by}: {message}"


def page(name: str) -> str:
    """The block of a page: the edit, the command, the message, and what a run without gates does."""
    fault = faults()[name]
    off = fault.without or WITHOUT.get(by := run(fault, "off").by, f"Without gates the run ends with `{by}`, later")
    lines = diff(fault.edits)
    lines += ["```sh", f".venv/bin/python -m tests.pages break {name}", "```", ""]
    lines += ["```{ .text .wrap }", told(name), "```", ""]
    return "\n".join([*lines, f"{off}."])
