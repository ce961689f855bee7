"""The engine to run: many requests in one batch, over one block pool, one token a request and step.

It owns the parts and the order in which they act; what each does is in its own module. A prompt is prefilled in chunks
from the step that admits it; its last chunk gives the first token, and it decodes from there. It keeps the `Engine`
protocol of `reference.request`; it knows no text, no clock and no socket.

Gates: gates.engine. Proof: tests/test_fast_engine.py. Story: engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fast.audit import Audit
from fast.backend import AnyForward, KernelBackend, build_backend, facts_of
from fast.cache import BatchedPagedKVCache
from fast.capture import Recorder
from fast.chunk import unanswered
from fast.commit import Commit
from fast.compact import RowCompactor, RowMove
from fast.compiled import DEFAULT_BACKEND
from fast.decode import DEFAULT_WIDTH_MULTIPLE, DecodePath
from fast.device_sampling import DeviceChoice
from fast.forwards import Forwards
from fast.overlap import Choice, Flight, HostChoice, Overlap, blocks_written
from fast.pool import KVPoolPlan, plan_pool
from fast.prefill import PrefillPath
from fast.prefix import Prefix, PrefixCache
from fast.recheck import Recheck
from fast.record import Listeners, Mark, StepRecord, unheard
from fast.rows import Rows, Sequence, random_seed
from fast.sampling import sample_rows
from fast.scheduler import Scheduler, SchedulerOutput
from fast.score import scores_of
from fast.warmup import WarmupReport
from gates import FULL, enabled
from gates.engine import check_gauges
from reference import request as contract
from reference.config import ModelConfig
from reference.request import Completion, Event, Request, validate_submit
from reference.weights import ModelWeights


class Engine:
    """Continuous batching over a paged K/V cache; `build` makes one from a model, limits and switches."""

    def __init__(
        self,
        forward: AnyForward,
        cache: BatchedPagedKVCache,
        *,
        decode: DecodePath | None = None,
        compactor: RowCompactor | None = None,
        pool_plan: KVPoolPlan | None = None,
        chunk_tokens: int | None = None,
        prefix_cache: bool = False,
        reserve_growth: bool = False,
        overlap: bool = False,
        seed_source: Callable[[], int] = random_seed,
    ) -> None:
        self.config = forward.config
        self.forward = forward
        self.cache = cache
        self.decode = decode or DecodePath(forward, cache)
        self.prefill = PrefillPath(forward, cache)
        self.pool_plan = pool_plan
        self.recheck = Recheck(forward, cache, every=0)
        self.rows = Rows(cache.max_batch_size)
        self.prefix = PrefixCache(cache.allocator, block_size=cache.block_size) if prefix_cache else None
        self.scheduler = Scheduler(
            cache,
            compactor=compactor,
            on_admit=self.rows.admit,
            on_release=self._leave_row,
            written=lambda: self.overlap.written,
            snapshot=lambda: self.audit.snapshot(),
            chunk_tokens=chunk_tokens,
            prefix=self.prefix,
            reserve_growth=reserve_growth,
        )
        self.forwards = Forwards(cache, self.scheduler, prefill=self.prefill, decode=self.decode)
        self.overlap = Overlap(on=overlap)
        self.commit = Commit(self.scheduler, self.rows, self.overlap, max_model_len=cache.max_model_len)
        self.audit = Audit(cache, self.scheduler, self.rows, self.prefill, self.decode)
        if compactor is not None:
            compactor.on_move = self._move_row
        self.steps = 0
        self.mixed_steps = False  # a step that has both computes chunks and decoding rows in one forward
        self.samples_on_device = overlap or forward.device.type == "cuda"  # else logits are on the host as they are
        self.fail_alone = False  # a gate that speaks of one answer ends that one, instead of the step; servers want it
        self._seed_source = seed_source
        self._open: dict[str, Sequence] = {}  # every request whose last event is still to come
        self._aborted: list[str] = []  # ended, but the next step is yet to say so
        self._early: list[Event] = []  # of a step that an abort had to wait for; the next one says them
        self._arrivals = 0
        self.last_admitted: tuple[str, ...] = ()  # ids that got a row in the newest step, in order of arrival
        parts: dict[str, Any] = {"scheduler": self.scheduler, "cache": cache, "decode": self.decode}
        self.listeners = Listeners(**parts, overlap=self.overlap, clock=time.perf_counter_ns)

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        max_batch_size: int = 32,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_bytes: int | None = None,
        max_model_len: int | None = None,
        chunk_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        bucket_decode: bool = False,
        persist_inputs: bool = False,
        capture_decode: bool = False,
        record_on_miss: bool = False,
        compile_decode: bool = False,
        compile_backend: str = DEFAULT_BACKEND,
        compact_rows: bool = False,
        gather_rows: bool = False,
        prefix_cache: bool = False,
        reserve_growth: bool = False,
        overlap: bool = False,
        width_multiple: int = DEFAULT_WIDTH_MULTIPLE,
        kernels: bool = False,
        half_weights: bool = False,
        half_kv: bool = False,
        threads: int | None = None,
        take_weights: bool = False,
        triton: bool = False,
        invariant: bool = False,
        recorder: Recorder | None = None,
        seed_source: Callable[[], int] = random_seed,
    ) -> Engine:
        """An engine over the pool that `plan_pool` makes of the sizes; every switch is separate and off.

        `compact_rows` moves survivors into holes, `gather_rows` reads rows where they are through a fixed buffer.
        `kernels` computes on the CPU's, in float32 unless told, `triton` on the GPU's, where `invariant` takes products
        that know no row count. `take_weights` empties `weights`: the model is in memory once. A step computes
        `chunk_tokens` at most. `prefix_cache` shares K/V of prompts that begin alike; `overlap` launches a step before
        the tokens of the one before are known. The other switches are `DecodePath`'s: see `warm_decode`.

        Raises:
            ValueError: a limit is out of range, the pool holds nobody, or switches contradict each other.
        """
        sizes: dict[str, Any] = {"max_batch_size": max_batch_size, "block_size": block_size, "num_blocks": num_blocks}
        sizes |= {"kv_bytes": kv_bytes, "max_model_len": max_model_len, "kernels": kernels}
        pool_plan = plan_pool(config, element_bytes=2 if half_kv else dtype.itemsize, **sizes)
        how: dict[str, Any] = {"dtype": dtype, "device": device, "gather": gather_rows, "kernels": kernels}
        how |= {"half_weights": half_weights, "half_kv": half_kv, "threads": threads, "take_weights": take_weights}
        rows = _row_compactor(compact_rows=compact_rows, gather_rows=gather_rows)
        made = build_backend(config, weights, pool_plan, triton=triton, invariant=invariant, **how)
        switches: dict[str, Any] = {"bucket_decode": bucket_decode, "persist_inputs": persist_inputs}
        switches |= {"capture_decode": capture_decode, "record_on_miss": record_on_miss, "recorder": recorder}
        switches |= {"compile_decode": compile_decode, "compile_backend": compile_backend}
        decode = DecodePath(*made, width_multiple=width_multiple, **switches)
        kept: dict[str, Any] = {"chunk_tokens": chunk_tokens, "prefix_cache": prefix_cache, "seed_source": seed_source}
        kept |= {"reserve_growth": reserve_growth, "overlap": overlap, "pool_plan": pool_plan}
        return cls(*made, decode=decode, compactor=rows, **kept)

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and answer together, that one request may have; clamped to the pool."""
        return self.cache.max_model_len

    @property
    def has_work(self) -> bool:
        """True while any request is open, an aborted one whose event is not out yet included."""
        return bool(self._open)

    def submit(self, request: Request) -> None:
        """Queue a request. Its seed is settled here, so nothing that happens later can change its draws.

        Raises:
            ValueError: it can never run as asked (the pool included); the engine is unchanged.
        """
        validate_submit(
            request, vocab_size=self.config.vocab_size, max_model_len=self.max_model_len, open_ids=self._open
        )
        params, eos = request.params, self.config.eos_token_ids
        room = self.max_model_len - len(request.prompt_ids)
        sequence = Sequence(
            request=request,
            arrival=self._arrivals,
            seed=self._seed_source() if params.seed is None else params.seed,
            ends=frozenset(params.stop_token_ids if params.ignore_eos else (*eos, *params.stop_token_ids)),
            forbidden=tuple(sorted({*eos, *params.stop_token_ids})),
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            tokens=list(request.prompt_ids),
            scores=scores_of(request),
        )
        if self.prefix is not None and request.prefix_cache:
            sequence.prefix = Prefix(request.cache_salt, apart=sequence.reads_prompt)
        if request.guide is not None:
            sequence.guide = request.guide.start(vocab_size=self.config.vocab_size, eos_token_ids=eos)
        self._arrivals += 1
        self._open[request.id] = sequence
        self.scheduler.add(sequence)
        self.recheck.submitted(sequence)
        if self.listeners.recorder is not None:
            self.listeners.recorder.submitted(request, seed=sequence.seed)

    def abort(self, request_id: str) -> None:
        """Drop a request whatever its state: row and blocks are free at once, its event comes with the next step."""
        if request_id not in self._open or request_id in self._aborted:
            return
        sequence = self._open[request_id]
        if self.overlap.flights and sequence.row is not None:
            self.overlap.waits["abort"] += 1
            self._early += self._land(unheard)
        if sequence.ended_at is None:  # else it was over before it was aborted
            self.scheduler.release(sequence)
            self._aborted.append(request_id)

    def step(self) -> list[Event]:
        """One token for each row that decodes, and for each whose prompt is computed whole."""
        if self.listeners.recorder is None:
            return self._step(unheard)
        return self.listeners.recorder.record(self._step, number=self.steps + 1)

    def idle(self) -> bool:
        """One forward of a re-run, as `Recheck.turn`, while no request is open; False when there is nothing to do."""
        return not self._open and self.recheck.turn()

    def record_steps(self, on_step: Callable[[StepRecord], None] | None) -> None:
        """Hand a record of each step to `on_step` from now on; None ends that, and with it all that it cost.

        Raises:
            ValueError: a request is open, so that the records would begin in the middle of it.
        """
        if on_step is not None and self._open:
            raise ValueError(f"on_step: {len(self._open)} requests are open, records begin on an idle engine")
        self.listeners.trace(on_step)

    def watch_steps(self, on_step: Callable[[StepRecord], None] | None) -> None:
        """As `record_steps`, beside it and at any time: the first record tells every row and block there is."""
        self.listeners.watch(on_step)

    def describe(self) -> dict[str, Any]:
        """The facts of start-up: limits, memory plan, switches and warm list."""
        compactor = self.scheduler.compactor
        return {
            "name": "fast",
            "dtype": str(self.forward.dtype),
            "backend": facts_of(self.forward),
            "max_model_len": self.max_model_len,
            "rows": "free" if compactor is None else compactor.mode,
            "chunk_tokens": self.scheduler.chunk_tokens,
            "due_after": self.scheduler.due_after,
            "prefix_cache": self.prefix is not None,
            "reserve_growth": self.scheduler.reserve_growth,
            "overlap": self.overlap.on,
            "pool": None if self.pool_plan is None else self.pool_plan.as_dict(),
            "decode": self.decode.describe(),
        }

    def stats(self) -> dict[str, Any]:
        """Requests, K/V in tokens and blocks, and what was computed so far; always current, no step needed."""
        gauges = {
            "running": sum(1 for one in self.scheduler.running.values() if one.ended_at is None),
            "waiting": len(self.scheduler.waiting),
            "kv_tokens": self.cache.num_tokens,
            "kv_capacity_tokens": self.cache.num_slots,
        }
        ending = len(self._aborted) + sum(1 for event in self._early if event.finish_reason is not None)
        check_gauges(**gauges, ending=ending, open_requests=len(self._open))
        return gauges | {
            "free_blocks": self.cache.allocator.num_free + self.recheck.blocks_held,
            "num_blocks": self.cache.allocator.num_blocks,
            "preemptions": self.scheduler.preemptions,
            "steps": self.steps,
            "prefill_tokens": self.prefill.tokens - self.forwards.mixed_tokens,
            "rechecked": self.recheck.checked,
            "prefix_query_tokens": self.scheduler.query_tokens,
            "prefix_hit_tokens": self.scheduler.hit_tokens,
            "prefix_blocks": 0 if self.prefix is None else len(self.prefix),
            "prefix_evictions": 0 if self.prefix is None else self.prefix.evictions,
            "steps_ahead": self.overlap.ahead,
            "step_waits": dict(self.overlap.waits),
            "dropped_tokens": self.overlap.dropped,
            "moves": 0 if self.scheduler.compactor is None else self.scheduler.compactor.moves,
            **self.decode.stats(),
            "decode_tokens": self.decode.tokens + self.forwards.mixed_tokens,
        }

    def warm_decode(
        self, *, max_rows: int | None = None, max_width: int | None = None, budget_bytes: int | None = None
    ) -> WarmupReport:
        """Compile and record what the switches ask for, before the first request; see `DecodePath.warm`."""
        return self.decode.warm(max_rows=max_rows, max_width=max_width, budget_bytes=budget_bytes)

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Run requests to their end on an idle engine; see `reference.request.generate`."""
        return contract.generate(self, requests)

    def _step(self, mark: Mark) -> list[Event]:
        self.steps += 1
        # 1. Say what was aborted since the last step.
        events = [*self._early, *(Event(request_id, None, "abort") for request_id in self._aborted)]
        self._early.clear()
        self._aborted.clear()
        # 2. Who runs: grow, compact, admit. Whoever is to lose its row needs its tokens first.
        if self.overlap.flights:
            self.scheduler.park()
            if not self.scheduler.growth_fits:
                self.overlap.waits["preemption"] += 1
                events += self._land(mark)
        output = self.scheduler.schedule()
        self.last_admitted = tuple(sequence.request.id for sequence in output.admitted)
        self.audit.schedule(output)
        mark("schedule", output)
        self.overlap.vacated.clear()
        # 3. Prompts compute their next chunk (those that were preempted, their answer so far), and those whose last
        #    token alone is to be computed do that.
        parts = self.forwards.run(output, mark, mixed=self.mixed_steps, before=self.overlap.flight)
        stored = [(chunk.sequence, self.cache.tables[chunk.row].length) for chunk in output.chunks]
        self.audit.computed_twice(self.commit.publish(stored))
        waiting = len(self.overlap.flights)
        if output.rows:
            # 4. Every row that is up to date chooses its next token; most steps have one part, which is not copied.
            self._launch(output, parts[0] if len(parts) == 1 else torch.cat(parts))
        # 5. Tokens of the step before join their sequences while this one runs, and its own unless it may stay in
        #    flight; rows and blocks of those that ended are free again.
        for _ in range(waiting):
            events += self._land(mark)
        if self.overlap.flights and not self.overlap.may_stay(self.scheduler.running.values()):
            events += self._land(mark)
        events += self.commit.end(unanswered(output.chunks), fail_alone=self.fail_alone)
        # 6. Close what ended.
        open_before = self._open_among(events)
        for event in events:
            if event.finish_reason is not None:
                del self._open[event.request_id]
                self.recheck.ended(event.request_id, event.finish_reason)
        self.overlap.check()
        self.audit.step(events, open_before=open_before, open_after=self._open_among(events))
        mark("commit")
        return events

    def _move_row(self, move: RowMove) -> None:
        self.cache.move_row(src=move.src, dst=move.dst)
        self.rows.move(src=move.src, dst=move.dst)

    def _leave_row(self, row: int) -> None:
        if self.overlap.on:
            self.overlap.vacated.append(self.rows.request_id(row))
        self.rows.release(row)

    def _launch(self, output: SchedulerOutput, logits: Tensor) -> None:  # [R, V]
        """The step is in flight: its tokens are chosen where its logits are, or here and now."""
        sequences = tuple([self.scheduler.running[row] for row in output.rows])
        choice = self._sample(logits, output.rows)
        own = {"recheck": self.recheck.watches(sequences), "score": bool(unanswered(output.chunks))}
        flight = Flight(
            sequences=sequences,
            num_decoding=len(output.decode_rows),
            choice=choice,
            reasons=[*sorted(choice.host_reasons), *(reason for reason, holds in own.items() if holds)],
            writes=blocks_written(output, self.cache) if self.overlap.on else (),
            fed=self.forwards.fed,
        )
        self.overlap.launch(flight)

    def _land(self, mark: Mark) -> list[Event]:
        """Wait for the oldest step in flight; its tokens join their sequences."""
        flight, sampled = self.overlap.land(fail_alone=self.fail_alone)
        mark("sample")
        if self.prefix is not None:
            self.audit.computed_twice(self.commit.publish(flight.decoding))
        events = self.commit.take(flight.sequences, sampled, fail_alone=self.fail_alone)
        mark("commit")
        return events

    def _sample(self, logits: Tensor, rows: tuple[int, ...]) -> Choice:  # [R, V]
        self.audit.before_sampling(rows)
        stored = [self.cache.tables[row].length for row in rows]
        self.recheck.saw(self.scheduler.running, rows, logits)
        how: dict[str, Any] = {"index": rows, "positions": stored}
        if self.samples_on_device:
            return DeviceChoice(logits, self.rows, **how)
        chooser = self.forward if isinstance(self.forward, KernelBackend) else None
        how |= {"fail_alone": self.fail_alone, "chooser": chooser}
        return HostChoice(sample_rows(logits, self.rows, **how))

    def _open_among(self, events: list[Event]) -> set[str]:
        """The open requests that the gate sees: all at full, else those that spoke, for a queue can be long."""
        spoke = {event.request_id for event in events}
        return set(self._open) if enabled(FULL) else {name for name in spoke if name in self._open}


def _row_compactor(*, compact_rows: bool, gather_rows: bool) -> RowCompactor:
    if compact_rows and gather_rows:
        raise ValueError("gather_rows: True leaves rows in place, compact_rows moves them; choose one")
    return RowCompactor("compact" if compact_rows else "gather" if gather_rows else "free")
