"""The fault of each page: one edit of the source, a workload that passes it, and the gate that fires with its words.

Most are exhibits of the museum; the others are made here, for the whiteboard engine and the server. `run` puts a fault
in place and tells what stopped it; `python -m tests.pages break NAME` prints that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count

import torch

from fast.chunk import share_budget
from fast.compiled import CompiledDecode
from fast.engine import Engine
from fast.gpu_tasks import plan_tasks
from fast.kernels.forward import KernelForward
from fast.linear import fp32_linear
from fast.record import StepRecorder
from fast.sampling import sample_rows
from fast.scheduler import Scheduler
from reference.attention import dense_attention
from reference.batch import run_batch
from reference.blocks import BatchedPagedKVCache
from reference.cache import KVCache
from reference.engine import Engine as ReferenceEngine
from reference.model import LlamaModel
from reference.request import Event, Request, SamplingParams
from reference.tokenizer import ByteTokenizer, IncrementalDecoder
from serve.answer import Answer
from serve.live import Viewer
from serve.loop import EngineLoop
from serve.metrics import Metrics
from serve.tools import _withheld
from tests.harness import TINY, tiny_reference, tiny_weights
from tests.museum.catalogue import EXHIBITS
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Caught, Edit, applied, watch
from tests.pages import runs, workloads
from tests.pages.catalogue import diff

ADDRESS = re.compile(r"0x[0-9a-f]+")
DIGEST = re.compile(r"\b[0-9a-f]{32}\b")  # of logits, whose last bits are a machine's own
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


COUNTED = 'self._ended += 1\n    self._success.labels(self._labels["model_name"], timeline.finish_reason).inc()'
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
OWN |= {
    "coverage": Fault(
        (Edit(Scheduler.schedule, "moves = self._compact()", "moves = self._compact() if self.waiting else ()"),),
        workloads.mixed_lengths,
        "Without gates the run ends with every token right, and the last steps cost what they cost before recordings",
    ),
    "linear": Fault(
        (
            Edit(
                fp32_linear,
                "_linear_pointwise(x, packed",
                "_linear_pointwise((x * (127 / x.abs().max())).round() * (x.abs().max() / 127), packed",
            ),
        ),
        workloads.packed_layer,
        "Without gates the table says that such counts are safe, and a loud neighbour costs a row its resolution",
    ),
    "kernels": Fault(
        (
            Edit(
                KernelForward.decode,
                "np.ascontiguousarray(plan.slot_mapping.numpy()[:, : max(1, int(lens.max())) : LANES])",
                "plan.slot_mapping.numpy()[:, : max(1, int(lens.max())) : LANES]",
            ),
        ),
        workloads.two_rows_on_kernels,
        "Without gates the first two clients wait some seconds for a compiler, and every number is right",
    ),
    "compiled": Fault(
        (
            Edit(
                CompiledDecode._run, "forward.embedding[plan.input_ids]", "forward.embedding.t()[:, plan.input_ids].t()"
            ),
        ),
        workloads.compiled_layers,
        "Without gates start-up takes longer, every number is right, and nobody learns why",
    ),
    "invariance": Fault(
        (
            Edit(
                KernelForward.decode,
                "_logits(self._hidden[:rows], self._decode_logits)",
                "_logits(self._hidden[:rows], self._prefill_logits)",
            ),
        ),
        workloads.answered_and_checked,
        "Without gates `b` begins with a token that was drawn from its neighbour's logits, and goes on fluently",
    ),
    "app": Fault(
        (Edit(EngineLoop._run, "self._failure = failure", "return"),),
        workloads.engine_that_dies,
        "Without gates `/health` and `/ready` answer 200, and whoever asks something waits for ever",
    ),
    "limits": Fault(
        (Edit(Engine.max_model_len.fget, "self.cache.max_model_len", "self.config.max_positions"),),  # type: ignore[attr-defined]
        workloads.longer_than_the_pool,
        "Without gates the request stands at the head of the queue for ever, and everybody waits behind it",
    ),
    "metrics": Fault(
        (
            Edit(
                Metrics.ended,
                f"{COUNTED}\n    if timeline.num_tokens == 0:\n        return",
                f"if timeline.num_tokens == 0:\n        return\n    {COUNTED}",
            ),
        ),
        workloads.left_before_its_turn,
        "Without gates `b` is in no count and no gauge, and the numbers of a day do not add up",
    ),
    "trace": Fault(
        (Edit(StepRecorder._with_schedule, "rows != self._rows", "len(rows) != len(self._rows)"),),
        workloads.traced_and_read,
        "Without gates the file is read to its end, and tells of an engine in which a request changed its row unseen",
    ),
    "guide": Fault(
        (Edit(sample_rows, "[allowed[n] for n in busy])", "allowed[: len(busy)])"),),
        workloads.one_guided_of_two,
    ),
    "tools": Fault(
        (Edit(_withheld, "range(min(len(OPEN) - 1, len(text)), 0, -1)", "(1,)"),),
        workloads.call_in_two_pieces,
        "Without gates a streaming client reads `<tool_call>` as text and gets no call, where the whole reply has one",
    ),
}
OWN |= {
    "live": Fault(
        (Edit(Viewer.offer, "if len(self._waiting) >= VIEWER_FRAMES:", "if self._ended:"),),
        workloads.frames_for_a_sleeper,
        "Without gates the picture is whole for everybody, and a tab that sleeps a night keeps half a million frames",
    ),
    "gpu": Fault(
        (Edit(plan_tasks, "min(most, tokens - i), start + i, base)", "min(most, tokens - i), start, base)"),),
        workloads.tiled_prefill,
        "Without gates the kernel runs, each tile but a chunk's first sees too few keys, and the answer is fluent",
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
    "overlap": "blocks go back when no step writes them",
    "compact": "a move copies the whole live prefix",
    "attention": "a padded row computes finite numbers",
    "prefix": "a hash is not a prefix",
    "lockstep": "a penalty sees every token of the answer",
}


def faults() -> dict[str, Fault]:
    """Every page's fault, by the page's subject."""
    exhibits = {exhibit.name: exhibit for exhibit in EXHIBITS}
    return OWN | {page: Fault(exhibits[n].edits, exhibits[n].scene) for page, n in FROM_THE_MUSEUM.items()}


@cache
def run(fault: Fault, level: str) -> Caught:
    """The workload with the fault in place, at a level of the gates; once a process, for what is compiled stays so."""
    with applied(fault.edits):
        return watch(fault.scene, level)


def told(name: str) -> str:
    """What `python -m tests.pages break NAME` prints; what changes with the run or the machine is left out."""
    caught = run(faults()[name], "full")
    number = count(1)
    message = DIGEST.sub(lambda _: f"<digest {next(number)}>", ADDRESS.sub("0x...", caught.message))
    return message if message.startswith("gate ") else f"{caught.by}: {message}"


def page(name: str) -> str:
    """The block of a page: the edit, the command, the message, and what a run without gates does."""
    fault = faults()[name]
    off = fault.without or WITHOUT.get(by := run(fault, "off").by, f"Without gates the run ends with `{by}`, later")
    lines = diff(fault.edits)
    lines += ["```sh", f".venv/bin/python -m tests.pages break {name}", "```", ""]
    lines += ["```{ .text .wrap }", told(name), "```", ""]
    return "\n".join([*lines, f"{off}."])
