"""transformers: float32, its own attention and cache, one forward a step (what `generate` does between two tokens)."""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.bench.peers.workload import Job, Step, main, versions_of


class Transformers:
    """A batch in one rectangle; rows that end are cut from the cache."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self.model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).eval()
        self.versions = versions_of("transformers", "torch")

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        """See `Peer`."""
        begin = time.perf_counter()
        self._next(torch.tensor([prompt]), DynamicCache())
        return time.perf_counter() - begin

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], lengths: list[int]) -> tuple[list[Step], list[int]]:
        """See `Peer`."""
        cache, rows = DynamicCache(), len(prompts)
        begin = time.perf_counter()
        ids = self._next(torch.tensor(prompts), cache)
        steps, answer = [Step(rows, True, time.perf_counter() - begin)], [int(ids[0])]
        for number in range(1, max(lengths)):
            begin = time.perf_counter()
            left = sum(length > number for length in lengths)  # lengths fall from row to row
            if left < rows:
                cache.batch_select_indices(torch.arange(left))
                ids, rows = ids[:left], left
            ids = self._next(ids, cache)
            steps.append(Step(rows, False, time.perf_counter() - begin))
            answer.append(int(ids[0]))
        return steps, answer

    def _next(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:  # [R, T] -> [R, 1]
        return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)


if __name__ == "__main__":
    main(Transformers)
