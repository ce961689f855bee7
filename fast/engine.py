"""The engine to run: many requests in one batch, over one block pool, one token a request and step.

It owns the parts and the order in which they act; what each does is in its own module. Newcomers are prefilled in
the step that admits them, which gives their first token, and join the decode batch in the next one. It keeps the
`Engine` protocol of `reference.request`; it knows no text, no clock and no socket.

Gates: gates.engine. Proof: tests/test_fast_engine.py. Story: engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fast.cache import BatchedPagedKVCache
from fast.compact import RowCompactor, RowMove
from fast.model import Chunk, Forward
from fast.plan import plan_decode
from fast.rows import Rows, Sequence
from fast.sampling import Sampled, sample_rows
from fast.scheduler import Scheduler, SchedulerOutput
from gates import FULL, enabled
from gates.blocks import check_blocks_conserved, check_mapping_follows_tables, check_owned_once, check_tables_cover
from gates.engine import check_ends_once, check_gauges, check_tokens_cached, check_within_limits
from gates.sampling import check_draw_position
from gates.scheduler import check_decode_room, check_rows_follow_requests, check_vacated_rows_neutral
from reference import request as contract
from reference.config import ModelConfig
from reference.request import Completion, Event, Request, validate_submit
from reference.weights import ModelWeights

DEFAULT_KV_BYTES = 1 << 30


def random_seed() -> int:
    """An int64 nobody can guess, for a request that names no seed."""
    return secrets.randbits(64) - 2**63


class Engine:
    """Continuous batching over a paged K/V cache; `build` makes one from a model and limits."""

    def __init__(
        self,
        forward: Forward,
        cache: BatchedPagedKVCache,
        *,
        compactor: RowCompactor | None = None,
        seed_source: Callable[[], int] = random_seed,
    ) -> None:
        self.config = forward.config
        self.forward = forward
        self.cache = cache
        self.rows = Rows(cache.max_batch_size)
        self.scheduler = Scheduler(cache, compactor=compactor, on_admit=self.rows.admit, on_release=self.rows.release)
        if compactor is not None:
            compactor.on_move = self._move_row
        self.decode_steps = self.prefill_tokens = self.decode_tokens = self.steps = 0
        self._seed_source = seed_source
        self._open: dict[str, Sequence] = {}  # every request whose last event is still to come
        self._aborted: list[str] = []  # ended, but the next step is yet to say so
        self._arrivals = 0

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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        compact_rows: bool = False,
        seed_source: Callable[[], int] = random_seed,
    ) -> Engine:
        """An engine with a pool of `num_blocks`, or of what `kv_bytes` buys (1 GiB unless told), never more than
        `max_batch_size` full-length requests can use.

        Raises:
            ValueError: a limit is out of range, or the pool cannot hold one prompt token and one answer token.
        """
        limit = config.max_positions if max_model_len is None else min(max_model_len, config.max_positions)
        if num_blocks is not None and kv_bytes is not None:
            raise ValueError(f"kv_bytes: {kv_bytes} and num_blocks {num_blocks} both size the pool; give one")
        if num_blocks is None:
            block_bytes = config.kv_elements_per_token * dtype.itemsize * block_size
            most = max_batch_size * -(-limit // block_size)
            num_blocks = min(most, (DEFAULT_KV_BYTES if kv_bytes is None else kv_bytes) // block_bytes)
        if min(limit, num_blocks * block_size) < 2:
            raise ValueError(
                f"max_model_len: {limit} tokens over {num_blocks} blocks of {block_size} is not at least 2"
            )
        cache = BatchedPagedKVCache(
            config,
            max_batch_size=max_batch_size,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=limit,
            dtype=dtype,
            device=device,
        )
        forward = Forward(config, weights, max_positions=cache.max_model_len, dtype=dtype, device=device)
        compactor = RowCompactor("compact" if compact_rows else "free")
        return cls(forward, cache, compactor=compactor, seed_source=seed_source)

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
            max_tokens=min(room, params.max_tokens or room),
            tokens=list(request.prompt_ids),
        )
        self._arrivals += 1
        self._open[request.id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request whatever its state: row and blocks are free at once, its event comes with the next step."""
        if request_id in self._open and request_id not in self._aborted:
            self.scheduler.release(self._open[request_id])
            self._aborted.append(request_id)

    def step(self) -> list[Event]:
        """One token for each request that has a row."""
        open_before = set(self._open)
        self.steps += 1
        # 1. Say what was aborted since the last step.
        events = [Event(request_id, None, "abort") for request_id in self._aborted]
        self._aborted.clear()
        # 2. Who runs: grow, compact, admit.
        output = self.scheduler.schedule()
        self._check_schedule(output)
        if output.rows:
            # 3. Newcomers compute their whole prompt (and answer, when they were preempted).
            parts = [self._prefill(output)] if output.admitted else []
            # 4. Those that were running already compute their last token.
            parts += [self._decode(output.decode_rows)] if output.decode_rows else []
            # 5. Every row chooses its next token at once.
            sampled = self._sample(torch.cat(parts), output.rows)
            # 6. Tokens join their sequences; rows and blocks of those that ended are free again.
            events += self._commit(output.rows, sampled)
        # 7. Close what ended.
        for event in events:
            if event.finish_reason is not None:
                del self._open[event.request_id]
        self._check_step(events, open_before)
        return events

    def stats(self) -> dict[str, Any]:
        """Requests, K/V in tokens and blocks, and what was computed so far; always current, no step needed."""
        gauges = {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "kv_tokens": self.cache.num_tokens,
            "kv_capacity_tokens": self.cache.num_slots,
        }
        check_gauges(**gauges, ending=len(self._aborted), open_requests=len(self._open))
        return gauges | {
            "free_blocks": self.cache.allocator.num_free,
            "num_blocks": self.cache.allocator.num_blocks,
            "preemptions": self.scheduler.preemptions,
            "steps": self.steps,
            "decode_steps": self.decode_steps,
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
        }

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Run requests to their end on an idle engine; see `reference.request.generate`."""
        return contract.generate(self, requests)

    def _move_row(self, move: RowMove) -> None:
        self.cache.move_row(src=move.src, dst=move.dst)
        self.rows.move(src=move.src, dst=move.dst)

    def _prefill(self, output: SchedulerOutput) -> Tensor:  # [A, V]
        chunks = []
        for row, sequence in zip(output.admitted_rows, output.admitted, strict=True):
            slots = self.cache.advance_row(row, len(sequence.tokens))
            chunks.append(Chunk(0, tuple(sequence.tokens), tuple(slots)))
            self.prefill_tokens += len(slots)
        return self.forward.prefill(chunks, self.cache)

    def _decode(self, rows: tuple[int, ...]) -> Tensor:  # [R, V]
        plan = plan_decode(
            tables=self.cache.tables,
            slot_table=self.cache.slot_table,
            rows=rows,
            input_ids=[self.scheduler.running[row].tokens[-1] for row in rows],
            sink_slot=self.cache.sink_slot,
        )
        if enabled(FULL):
            check_mapping_follows_tables(
                slot_mapping=plan.slot_mapping[: len(rows)],
                context_lens=plan.context_lens[: len(rows)],
                tables=[self.cache.tables[row].blocks for row in rows],
                block_size=self.cache.block_size,
            )
        self.decode_steps += 1
        self.decode_tokens += len(rows)
        return self.forward.decode(plan, self.cache)[: len(rows)]

    def _sample(self, logits: Tensor, rows: tuple[int, ...]) -> Sampled:  # [R, V]
        # Two counts of the same thing that cannot lean on each other: K/V stored, and tokens the request holds.
        stored = [self.cache.tables[row].length for row in rows]
        known = [len(self.scheduler.running[row].tokens) for row in rows]
        check_tokens_cached(cached_tokens=stored, known_tokens=known)
        check_draw_position(positions=stored, known_tokens=known)
        check_rows_follow_requests(
            rows={row: sequence.request.id for row, sequence in self.scheduler.running.items()},
            state={row: self.rows.request_id(row) for row in self.scheduler.running},
        )
        return sample_rows(logits, self.rows, index=rows, positions=stored)

    def _commit(self, rows: tuple[int, ...], sampled: Sampled) -> list[Event]:
        events = []
        for row, token, logprobs, error in zip(rows, sampled.token_ids, sampled.logprobs, sampled.errors, strict=True):
            sequence = self.scheduler.running[row]
            if error is not None:
                event = Event(sequence.request.id, None, "error", error=error)
            else:
                sequence.tokens.append(token)
                self.rows.count(row, token)
                event = Event(sequence.request.id, token, self._finish_reason(sequence), logprobs)
            if event.finish_reason is not None:
                self.scheduler.release(sequence)
            events.append(event)
        return events

    def _finish_reason(self, sequence: Sequence) -> str | None:
        """`stop` for an id that ends the answer (it is emitted all the same), `length` for a limit, else None."""
        full = sequence.num_generated == sequence.max_tokens
        reason = "stop" if sequence.tokens[-1] in sequence.ends else "length" if full else None
        check_within_limits(
            prompt_tokens=len(sequence.request.prompt_ids),
            output_tokens=sequence.num_generated,
            max_tokens=sequence.request.params.max_tokens,
            max_model_len=self.max_model_len,
            finished=reason is not None,
        )
        return reason

    def _check_schedule(self, output: SchedulerOutput) -> None:
        tables = [self.cache.tables[row] for row in output.decode_rows]
        check_decode_room(lengths=[table.length for table in tables], capacities=[table.capacity for table in tables])
        self._check_blocks()

    def _check_step(self, events: list[Event], open_before: set[str]) -> None:
        check_ends_once(
            events=[(event.request_id, event.finish_reason) for event in events],
            open_before=open_before,
            open_after=self._open.keys(),
        )
        check_tables_cover(
            lengths=[table.length for table in self.cache.tables],
            blocks_held=[len(table.blocks) for table in self.cache.tables],
            block_size=self.cache.block_size,
        )
        self._check_blocks()
        if enabled(FULL):
            check_vacated_rows_neutral(
                dirty={row: self.rows.dirty_columns(row) for row in self.scheduler.free_rows},
                total=self.cache.max_batch_size,
            )

    def _check_blocks(self) -> None:
        allocator = self.cache.allocator
        check_blocks_conserved(free=allocator.num_free, owned=allocator.num_owned, total=allocator.num_blocks)
        if enabled(FULL):  # every block id held, so not flat in the histories: tests and traces only
            check_owned_once(
                tables={row: table.blocks for row, table in enumerate(self.cache.tables)},
                num_blocks=allocator.num_blocks,
            )
