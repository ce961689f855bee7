"""What every engine of the comparison is asked to do, and how its answer is told; runs in any environment.

One process measures one engine. It reads a `Job` as JSON from its first argument and prints its measurements as one
JSON object, last. Prompts are token ids, so no tokenizer is compared. A batch starts with the most rows and shrinks:
rows end in groups, so one prefill gives decode steps at every batch size. Only steps that give a token to exactly so
many rows count, none in which a row speaks first, and not the first two of a size: an engine may settle.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

SETTLING = 2  # steps of a batch size that are not counted
TOLD_TOKENS = 16  # of one row's answer, to see that engines run the same model


@dataclass(frozen=True)
class Job:
    """One process's work: at each of `contexts`, `steps` decode steps for each of `batches`; and some prefills."""

    model: str  # a folder or a file, in the form that the engine reads
    threads: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int
    prefills: tuple[int, ...]
    prefill_rounds: int
    vocab_size: int
    options: dict[str, str]

    @property
    def rows(self) -> int:
        """Rows of the largest batch."""
        return max(self.batches)

    @property
    def answer_tokens(self) -> int:
        """Tokens of the longest answer, with room for rows that start before others."""
        return self.steps * len(self.batches) + 1 + self.steps

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest request."""
        return max([*(context + self.answer_tokens for context in self.contexts), *(n + 2 for n in self.prefills)])


@dataclass(frozen=True)
class Step:
    """One step of an engine: rows that got a token, whether one of them got its first, and how long it took."""

    rows: int
    first: bool
    seconds: float


class Peer(Protocol):
    """An engine, ready to run."""

    versions: dict[str, str]

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from handing in one prompt to its first token, alone; nothing of it stays."""

    def decode(self, prompts: list[list[int]], lengths: list[int]) -> tuple[list[Step], list[int]]:
        """Run to the end, row i for `lengths[i]` greedy tokens; every step, and the first row's tokens."""


def prompt_of(row: int, tokens: int, vocab_size: int) -> list[int]:
    """A prompt whose first token already differs from the other rows'."""
    return [(7919 * (row * 8191 + at) + 17) % vocab_size for at in range(tokens)]


def lengths_of(batches: Sequence[int], steps: int) -> list[int]:
    """Answer lengths with which a batch of the most rows runs `steps` decode steps at each of its sizes, falling."""
    return [1 + steps * sum(row < batch for batch in batches) for row in range(max(batches))]


def counted(steps: Iterable[Step], batches: Sequence[int]) -> dict[int, list[float]]:
    """Seconds of the decode steps that count, by batch size."""
    found: dict[int, list[float]] = {batch: [] for batch in batches}
    for step in steps:
        if not step.first and step.rows in found:
            found[step.rows].append(step.seconds)
    return {batch: seconds[SETTLING:] for batch, seconds in found.items()}


def measure(job: Job, start: Callable[[Job], Peer]) -> dict[str, Any]:
    """Everything the job asks for; times in seconds."""
    begin = time.perf_counter()
    peer = start(job)
    result: dict[str, Any] = {"start_s": time.perf_counter() - begin, "decode": {}, "prefill": {}, "tokens": {}}
    peer.decode([prompt_of(row, 24, job.vocab_size) for row in range(job.rows)], [3] * job.rows)  # compile, allocate
    for tokens in job.prefills:
        # Another prompt each time: none may find what an earlier one left.
        first, *prompts = (prompt_of(job.rows + i, tokens, job.vocab_size) for i in range(job.prefill_rounds + 1))
        peer.prefill(first)
        result["prefill"][tokens] = [peer.prefill(prompt) for prompt in prompts]
    for context in job.contexts:
        prompts = [prompt_of(row, context, job.vocab_size) for row in range(job.rows)]
        steps, answer = peer.decode(prompts, lengths_of(job.batches, job.steps))
        result["decode"][context] = counted(steps, job.batches)
        result["tokens"][context] = answer[:TOLD_TOKENS]
    return result | {"versions": peer.versions}


def main(start: Callable[[Job], Peer]) -> None:
    """The process: a job in, one JSON object out."""
    raw = json.loads(sys.argv[1])
    for name in ("contexts", "batches", "prefills"):
        raw[name] = tuple(raw[name])
    print("\n" + json.dumps(measure(Job(**raw), start)), flush=True)


def as_argument(job: Job) -> str:
    """The job as `main` reads it."""
    return json.dumps(asdict(job))


def versions_of(*packages: str) -> dict[str, str]:
    """Python's and some packages' versions, as installed here."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
