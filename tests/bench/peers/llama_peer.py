"""llama.cpp through llama-cpp-python's plain bindings: batches of sequences, one `llama_decode` a step, greedy."""

from __future__ import annotations

import ctypes
import time

import llama_cpp as llama
import numpy as np

from tests.bench.peers.workload import Job, Step, main, versions_of

BATCH = 2048


class LlamaCpp:
    """Weights as the GGUF file has them, K/V in halves (the default of llama.cpp)."""

    def __init__(self, job: Job) -> None:
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(job.model.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_seq_max = job.rows
        params.n_ctx = job.rows * -(-job.max_tokens // 256) * 256
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = job.threads
        self.context = llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama_init_from_model gave no context")
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        self.versions = versions_of("llama-cpp-python") | {"system": llama.llama_print_system_info().decode()}

    def prefill(self, prompt: list[int]) -> float:
        """See `Peer`."""
        begin = time.perf_counter()
        self._fill([prompt])
        seconds = time.perf_counter() - begin
        self._clear()
        return seconds

    def decode(self, prompts: list[list[int]], lengths: list[int]) -> tuple[list[Step], list[int]]:
        """See `Peer`."""
        begin = time.perf_counter()
        ids = self._fill(prompts)
        steps, answer = [Step(len(ids), True, time.perf_counter() - begin)], [ids[0]]
        for number in range(1, max(lengths)):
            begin = time.perf_counter()
            left = sum(length > number for length in lengths)  # lengths fall from row to row
            tokens = [(ids[row], len(prompts[row]) + number - 1, row, True) for row in range(left)]
            ids = self._run(tokens)
            steps.append(Step(left, False, time.perf_counter() - begin))
            answer.append(ids[0])
        self._clear()
        return steps, answer

    def _fill(self, prompts: list[list[int]]) -> list[int]:
        """Every prompt, in batches; each one's next token."""
        tokens = [
            (token, at, row, at == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        return [token for at in range(0, len(tokens), BATCH) for token in self._run(tokens[at : at + BATCH])]

    def _run(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """One batch of (token, position, sequence, wants logits); the next token of each that wants."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for at, (token, position, row, wants) in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wants
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
        if status := llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode gave {status} for {len(tokens)} tokens")
        wanted = sum(wants for *_, wants in tokens)
        if not wanted:
            return []
        logits = ctypes.cast(llama.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        rows = np.ctypeslib.as_array(logits, (wanted, self.vocab_size))
        return [int(token) for token in rows.argmax(axis=1)]

    def _clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)


if __name__ == "__main__":
    main(LlamaCpp)
