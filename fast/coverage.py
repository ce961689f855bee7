"""What share of a decode loop a recording can replay: the real scheduler and tables, driven without a model.

A recording reads at one address: the window that begins at row 0, so that it can replay a step whose rows are a prefix
0..n-1 and no other, or a buffer that every step's rows are gathered into. Requests of fixed answer lengths, dealt round
robin, are enough to see which steps those are: the schedule does not depend on what the tokens say. It knows no
weights; the pool has one layer of one tiny head.

Proof: tests/test_scheduler.py. Story: coverage.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import dataclass

from fast.cache import BatchedPagedKVCache
from fast.compact import RowCompactor
from fast.plan import plan_decode
from fast.rows import Sequence
from fast.scheduler import Scheduler, SchedulerOutput
from gates.warmup import check_arm_replayed_every_step
from reference.config import ModelConfig
from reference.request import Request, SamplingParams

BLOCK_SIZE = 16
_SMALLEST = ModelConfig(
    architecture="llama",
    vocab_size=1,
    hidden_size=2,
    intermediate_size=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    max_positions=1,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Counts over one run to the end."""

    decode_steps: int
    replayed: int  # decode steps that read at the recorded address, so that a recording covers them
    moves: int  # rows relabelled to keep it so
    cells: int  # int64 cells of addressing copied to keep it so, by moves or by gathers

    @property
    def scattered(self) -> int:
        """Decode steps that no recording covers."""
        return self.decode_steps - self.replayed

    @property
    def share(self) -> float:
        """Replayed steps of all decode steps, 0..1."""
        return self.replayed / self.decode_steps if self.decode_steps else 1.0


def coverage(
    *,
    rows: int,
    requests: int,
    gens: Sequenced[int],
    prompt_tokens: int = 4,
    compact_rows: bool = True,
    gather_rows: bool = False,
    num_blocks: int | None = None,
) -> Coverage:
    """Run `requests` requests, all there from the start, over `rows` rows; answer lengths `gens` are dealt in turn.

    A request's first token comes from its prefill, so an answer of g tokens takes g - 1 decode steps. The pool
    holds every row at full length unless `num_blocks` makes it tight. `gather_rows` takes the place of moves.

    Raises:
        ValueError: a count is not a positive integer, or one request cannot fit the pool.
    """
    counts = {"rows": rows, "requests": requests, "prompt_tokens": prompt_tokens}
    for name, count in [*counts.items(), *(("gens", gen) for gen in gens or [0])]:
        if count < 1:
            raise ValueError(f"{name}: {count} is not a positive integer")
    longest = prompt_tokens + max(gens)
    cache = BatchedPagedKVCache(
        _SMALLEST,
        max_batch_size=rows,
        num_blocks=rows * -(-longest // BLOCK_SIZE) if num_blocks is None else num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        gather=gather_rows,
    )
    if cache.max_model_len < longest:
        raise ValueError(f"num_blocks: {num_blocks} of {BLOCK_SIZE} hold {cache.max_model_len} of {longest} tokens")
    compactor = RowCompactor("gather" if gather_rows else "compact" if compact_rows else "free")
    compactor.on_move = lambda move: cache.move_row(src=move.src, dst=move.dst)
    scheduler = Scheduler(cache, compactor=compactor)
    for arrival in range(requests):
        scheduler.add(_sequence(arrival, prompt_tokens, gens[arrival % len(gens)]))
    decode_steps = replayed = gathered = 0
    while scheduler.has_work:
        output = scheduler.schedule()
        cells = _compute(output, cache)
        _emit(output, scheduler)
        if output.decode_rows:
            decode_steps += 1
            replayed += compactor.can_replay(output.decode_rows)
            gathered += cells if gather_rows else 0
    if compactor.mode != "free":
        scattered = decode_steps - replayed
        check_arm_replayed_every_step(
            decode_steps=decode_steps, replayed=replayed, reasons={"scattered rows": scattered}
        )
    return Coverage(decode_steps, replayed, compactor.moves, cache.slot_table.moved_cells + gathered)


def _sequence(arrival: int, prompt_tokens: int, gen: int) -> Sequence:
    request = Request((0,) * prompt_tokens, SamplingParams(max_tokens=gen), str(arrival))
    return Sequence(
        request=request,
        arrival=arrival,
        seed=0,
        ends=frozenset(),
        forbidden=(),
        max_tokens=gen,
        tokens=list(request.prompt_ids),
    )


def _compute(output: SchedulerOutput, cache: BatchedPagedKVCache) -> int:
    """What the forwards would do to the tables: chunks store all their tokens, the others one each.

    Returns the cells of the decode step's rectangle.
    """
    for chunk in output.chunks:
        cache.advance_row(chunk.row, chunk.count)
    if not output.decode_rows:
        return 0
    plan = plan_decode(
        tables=cache.tables,
        slot_table=cache.slot_table,
        rows=output.decode_rows,
        input_ids=[0] * len(output.decode_rows),
        sink_slot=cache.sink_slot,
    )
    return plan.slot_mapping.numel()


def _emit(output: SchedulerOutput, scheduler: Scheduler) -> None:
    for row in output.rows:
        sequence = scheduler.running[row]
        sequence.tokens.append(0)
        if sequence.num_generated == sequence.max_tokens:
            scheduler.release(sequence)
