"""OpenVINO GenAI's continuous batching pipeline: fp16 weights, float32 arithmetic."""

from __future__ import annotations

import time

import numpy as np
import openvino
import openvino_genai

from tests.bench.peers.workload import Job, Step, main, versions_of

BATCHED_TOKENS = 4096  # a step's prefill; more than the longest prompt that is timed alone
CACHE_GIB = 4


class OpenVINO:
    """`options`: `kv` float32 keeps K/V as it is computed; without it the pipeline's own default is used (8 bits)."""

    def __init__(self, job: Job) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = job.rows
        scheduler.max_num_batched_tokens = BATCHED_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": job.threads}
        if job.options.get("kv") == "float32":
            properties["KV_CACHE_PRECISION"] = "f32"
        self.pipe = openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)
        self.versions = versions_of("openvino", "openvino-genai") | {"properties": str(properties)}
        self.requests = 0

    def prefill(self, prompt: list[int]) -> float:
        """See `Peer`."""
        begin = time.perf_counter()
        handle = self._add(prompt, 1)
        while not handle.can_read():
            self.pipe.step()
        seconds = time.perf_counter() - begin
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
        return seconds

    def decode(self, prompts: list[list[int]], lengths: list[int]) -> tuple[list[Step], list[int]]:
        """See `Peer`."""
        handles = [self._add(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
        steps, spoken, answer = [], set(), []
        while self.pipe.has_non_finished_requests():
            begin = time.perf_counter()
            self.pipe.step()
            seconds = time.perf_counter() - begin
            rows = set()
            for row, handle in enumerate(handles):
                if handle.can_read():
                    rows.add(row)
                    (output,) = handle.read().values()
                    answer += output.generated_ids if row == 0 else []
            steps.append(Step(len(rows), not rows <= spoken, seconds))
            spoken |= rows
        return steps, answer

    def _add(self, prompt: list[int], length: int) -> openvino_genai.GenerationHandle:
        self.requests += 1
        config = openvino_genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False)
        return self.pipe.add_request(self.requests, openvino.Tensor(np.array([prompt], np.int64)), config)


if __name__ == "__main__":
    main(OpenVINO)
