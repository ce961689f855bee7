"""nanoserve as a peer among peers: the engine that `nanoserve serve` builds, driven by its steps."""

from __future__ import annotations

import time

import torch

from gates.core import set_level
from reference.request import Engine, Request, SamplingParams
from serve.boot import boot
from serve.cli import build_parser
from tests.bench.peers.workload import Job, Step, main, versions_of

BATCHED_TOKENS = 4096  # a step's prefill, as the other engines have it


class Nanoserve:
    """`options`: `kv` float16 keeps K/V in halves."""

    def __init__(self, job: Job) -> None:
        set_level("cheap")
        options = ["--model", job.model, "--threads", str(job.threads), "--max-batch-size", str(job.rows)]
        options += ["--max-model-len", str(job.max_tokens), "--kv-cache-memory", "1TiB"]
        options += ["--chunk-tokens", str(BATCHED_TOKENS)]
        options += ["--no-prefix-cache"]  # as the other engines: a prompt that comes again is computed again
        options += ["--half-kv"] * (job.options.get("kv") == "float16")
        _, engine = boot(build_parser().parse_args(["serve", *options]))
        self.engine: Engine = engine
        self.versions = versions_of("torch", "numba") | {"backend": str(engine.describe().get("backend"))}

    def prefill(self, prompt: list[int]) -> float:
        """See `Peer`."""
        request = Request(tuple(prompt), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), "prefill")
        begin = time.perf_counter()
        self.engine.submit(request)
        while not self.engine.step():
            pass
        return time.perf_counter() - begin

    def decode(self, prompts: list[list[int]], lengths: list[int]) -> tuple[list[Step], list[int]]:
        """See `Peer`."""
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            self.engine.submit(Request(tuple(prompt), params, str(row)))
        steps, spoken, answer = [], set(), []
        while self.engine.has_work:
            begin = time.perf_counter()
            events = self.engine.step()
            seconds = time.perf_counter() - begin
            names = {event.request_id for event in events}
            steps.append(Step(len(names), not names <= spoken, seconds))
            spoken |= names
            answer += [event.token_id for event in events if event.request_id == "0"]
        return steps, answer


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Nanoserve)
