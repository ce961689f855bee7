"""What nobody owns may hold anything: live K/V and outputs do not move by a bit, whatever stands beside them.

Before every step, and again between a step's plan and its forward, one kind of storage is filled with NaN or with
1e4: the sink slot, slots that no token is in, cells of the slot table past a row's length (with legal indices: other
rows' slots, free slots, the sink), and the padded lines of the input buffers. The same run without poison is the
measure, over every combination of the decode path's switches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fast.attention import decode_attention
from fast.engine import Engine
from fast.inputs import DecodeInputs
from fast.plan import DecodePlan
from gates import GateError
from gates.core import at_level
from tests.museum import scenes
from tests.museum.exhibit import Edit, applied

ROWS: dict[str, dict[str, bool]] = {"free": {}, "compact": {"compact_rows": True}, "gather": {"gather_rows": True}}
PATHS: dict[str, dict[str, bool]] = {
    "exact": {},
    "bucket": {"bucket_decode": True},
    "persist": {"persist_inputs": True},
    "bucket persist": {"bucket_decode": True, "persist_inputs": True},
    "capture": {"bucket_decode": True, "persist_inputs": True, "capture_decode": True},
}
ARMS = [(path, rows) for path in PATHS for rows in ROWS]
# The same on the CPU kernels, in float32 and blocks of 16; the last keeps its K/V in half precision.
KERNELS: dict[str, dict[str, bool]] = {
    "kernels exact": {"kernels": True},
    "kernels capture": {**PATHS["capture"], "kernels": True},
    "kernels half": {**PATHS["capture"], "kernels": True, "half_weights": True, "half_kv": True},
}
KERNEL_ARMS = [(path, rows) for path in KERNELS for rows in ROWS]
NAN, LARGE = float("nan"), 1e4
TIGHT = 9  # blocks: enough for the longest request, too few for all, so rows are preempted too


@dataclass
class Recorded:
    """What a run showed: events, the logits of live rows, and each live request's K/V after each step."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


class Poisoner:
    """Fills one kind of unowned storage of an engine; `kinds` names them."""

    kinds = ("sink", "free", "tails", "padding")

    def __init__(self, engine: Engine, kind: str, value: float) -> None:
        self.engine, self.kind, self.value = engine, kind, value

    def before_step(self) -> None:
        self.pour([])

    def before_forward(self, plan: DecodePlan) -> None:
        """Once more when the plan stands: this step's own slots are unwritten too, and padded lines can be reached."""
        self.pour(plan.slots)
        if self.kind == "padding":
            plan.input_ids[len(plan.rows) :] = 60
            plan.positions[len(plan.rows) :] = 17

    def pour(self, unwritten: tuple[int, ...] | list[int]) -> None:
        cache = self.engine.cache
        live = {slot for table in cache.tables for slot in table.slots(0, table.length)} - set(unwritten)
        nobody = [slot for slot in range(cache.num_slots) if slot not in live]
        slots = {"sink": [cache.sink_slot], "free": nobody, "tails": nobody, "padding": []}[self.kind]
        cache.fill(slots, self.value)
        if self.kind == "tails":
            table, legal = cache.slot_table, [*sorted(live), *nobody, cache.sink_slot]
            for row in range(cache.max_batch_size):
                tail = table.slots[row, table.length(row) :]
                tail.copy_(torch.tensor([legal[(7 * row + 5 * i) % len(legal)] for i in range(tail.numel())]))


def run(path: str, rows: str, kind: str | None = None, value: float = NAN) -> Recorded:
    """The museum's rush of six requests through one arm, poisoned or not."""
    sizes, dtype = {"num_blocks": TIGHT, "width_multiple": 16}, torch.float64
    if path in KERNELS:
        sizes, dtype = {"num_blocks": 4, "block_size": 16}, torch.float32
    switches = (PATHS | KERNELS)[path] | ROWS[rows]
    engine = Engine.build(scenes.TINY, scenes.tiny_weights(), dtype=dtype, **(scenes.SIZES | sizes), **switches)
    recorded = drive(engine, kind, value, steps=60)
    assert not engine.has_work
    recorded.stats = engine.stats()
    return recorded


def drive(engine: Engine, kind: str | None = None, value: float = NAN, *, steps: int) -> Recorded:
    """The first steps of the rush on a new engine, warmed where it captures."""
    if engine.decode.captured is not None:
        engine.warm_decode()
    recorded, poisoner = Recorded(), Poisoner(engine, kind, value) if kind else None
    _watch(engine, recorded, poisoner)
    for step in range(steps):
        for _, request in (pair for pair in scenes.RUSH if pair[0] == step):
            engine.submit(request)
        if poisoner is not None:
            poisoner.before_step()
        for event in engine.step():
            recorded.events.append((step, event.request_id, event.token_id, event.finish_reason))
        recorded.kept.append(dict(_live_kv(engine)))
    return recorded


def clean(path: str, rows: str) -> Recorded:
    """The same run with nothing poured, made anew: a run of the kernels changes how torch splits its later work."""
    return run(path, rows)


def _watch(engine: Engine, recorded: Recorded, poisoner: Poisoner | None) -> None:
    """Keep every step's logits, and pour once more between plan and forward; a plan must be whole by then."""
    sample, check = engine._sample, engine.decode._check_before

    def keeps_logits(logits: Tensor, rows: tuple[int, ...]) -> Any:
        recorded.logits.append(logits.clone())
        return sample(logits, rows)

    def pours(plan: DecodePlan) -> None:
        check(plan)
        if poisoner is not None:
            poisoner.before_forward(plan)

    engine._sample, engine.decode._check_before = keeps_logits, pours


def _live_kv(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    for row, sequence in engine.scheduler.running.items():
        table = engine.cache.tables[row]
        slots = table.slots(0, table.length)
        yield sequence.request.id, engine.cache.kv(slots)


def differences(poisoned: Recorded, wanted: Recorded) -> list[str]:
    """Every way in which two runs are not the same bits."""
    found = [] if poisoned.events == wanted.events else ["events"]
    pairs = zip(poisoned.logits, wanted.logits, strict=False)  # a row that failed ends its run early
    found += [f"logits of forward {n}" for n, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    for step, (now, then) in enumerate(zip(poisoned.kept, wanted.kept, strict=True)):
        found += [f"rows at step {step}"] if now.keys() != then.keys() else []
        same = sorted(now.keys() & then.keys())
        found += [f"K/V of {name} at step {step}" for name in same if not torch.equal(now[name], then[name])]
    return found


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, LARGE], ids=["nan", "1e4"])
@pytest.mark.parametrize("kind", ["sink", "free", "tails"])
@pytest.mark.parametrize(("path", "rows"), ARMS + KERNEL_ARMS, ids=lambda name: name.replace(" ", "+"))
def test_what_nobody_owns_reaches_no_live_bit(path: str, rows: str, kind: str, value: float):
    assert differences(run(path, rows, kind, value), clean(path, rows)) == []


@pytest.mark.parametrize(("path", "rows"), ARMS + KERNEL_ARMS, ids=lambda name: name.replace(" ", "+"))
def test_what_padded_lines_ask_for_reaches_no_live_bit(path: str, rows: str):
    assert differences(run(path, rows, "padding"), clean(path, rows)) == []


@pytest.mark.parametrize(("path", "rows"), ARMS + KERNEL_ARMS, ids=lambda name: name.replace(" ", "+"))
def test_the_run_is_padded_moved_preempted_and_replayed_where_its_arm_does_so(path: str, rows: str):
    stats = clean(path, rows).stats
    assert stats["preemptions"] > 0
    assert (stats["moves"] > 0) == (rows == "compact")
    switches = (PATHS | KERNELS)[path]
    assert (stats["row_padding_share"] > 0) == ("bucket_decode" in switches)
    assert (stats["replayed"] > 0) == ("capture_decode" in switches)


@pytest.mark.parametrize(("path", "rows"), ARMS, ids=lambda name: name.replace(" ", "+"))
def test_every_arm_gives_the_same_events(path: str, rows: str):
    def by_request(recorded: Recorded) -> list[tuple[Any, ...]]:
        return sorted(recorded.events, key=lambda event: event[:2])  # within a step the order is the rows'

    assert by_request(clean(path, rows)) == by_request(clean("exact", "free"))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("path", KERNELS)
def test_kernel_arms_keep_a_requests_bits_whatever_the_rows_do(path: str, rows: str):
    # Free rows, moved rows and gathered ones schedule alike, so step for step the K/V is the same.
    kept, wanted = clean(path, rows).kept, clean(path, "free").kept
    for here, there in zip(kept, wanted, strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in here)


# ---- rejects ----------------------------------------------------------------------------------------------------

NO_MASK = Edit(decode_attention, ".masked_fill_(~readable[:, :, None, None], 0.0)", "")
TO_SLOT_0 = Edit(DecodeInputs.write, "buffer[rows:] = neutral", "buffer[rows:] = 0")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("path", ["bucket persist", "capture"])
def test_a_value_that_is_weighed_and_not_masked_would_show(path: str, rows: str):
    clean(path, rows)
    with applied((NO_MASK,)):
        try:
            found = differences(run(path, rows, "tails", NAN), clean(path, rows))
        except GateError as fired:
            found = [fired.name]
    assert found, "zero times NaN is NaN, and nobody saw it"


def test_a_padded_row_that_writes_to_a_live_slot_would_show():
    wanted = clean("bucket persist", "compact")
    with applied((TO_SLOT_0,)), at_level("off"):  # no gate: the bits alone give it away
        found = differences(run("bucket persist", "compact"), wanted)
    assert any(fact.startswith("K/V of") for fact in found)
