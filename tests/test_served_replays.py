"""A served run with default flags replays every decode step, seen from a socket; the control arm does not.

The arms differ in one flag of the command line. Everything is read from `/health`, as an operator would.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fast.coverage import coverage
from gates import GateError
from gates.warmup import check_arm_replayed_every_step, check_no_cold_captures
from reference.request import Event, Request
from serve import boot
from serve.cli import build_parser
from serve.models import load_model
from tests.server import MODEL, serving

LENGTHS = (4, 8, 16, 32)


class Held:
    """An engine that takes all sixteen requests together, in order, so that a schedule does not depend on sockets."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._held = engine, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        self._held.append(request)
        if len(self._held) == 16:
            for one in sorted(self._held, key=lambda held: held.prompt_ids):
                self._engine.submit(one)

    def idle(self) -> bool:
        return self._engine.idle()

    @property
    def has_work(self) -> bool:
        return 0 < len(self._held) < 16 or self._engine.has_work

    def step(self) -> list[Event]:
        return self._engine.step() if len(self._held) == 16 else []


def run_arm(*flags: str) -> tuple[dict, dict, list[str]]:
    """Serve tiny-random with `flags`, send sixteen requests of four lengths at once; (boot, stats, texts)."""
    loaded = load_model("tiny-random")
    args = build_parser().parse_args(["serve", "--model", "tiny-random", "--max-batch-size", "8", *flags])
    switches = boot.switches(args) | boot.backend(args, loaded)
    if switches["half_weights"]:
        loaded = boot.round_weights(loaded)
    engine = boot.build_engine(loaded, max_batch_size=8, max_model_len=256, **switches)
    with serving(Held(engine), loaded.tokenizer) as served:

        def ask(i: int) -> str:
            reply = served.openai.completions.create(
                model=MODEL,
                prompt=[1, 2, 3, 4 + i],
                max_tokens=LENGTHS[i % 4],
                temperature=0.8,
                seed=i,
                extra_body={"ignore_eos": True},
            )
            return reply.choices[0].text

        with ThreadPoolExecutor(16) as pool:
            texts = list(pool.map(ask, range(16)))
        health = served.health()
    return health["boot"], health["engine"], texts


# ---- holds ------------------------------------------------------------------------------------------------------


def test_default_flags_replay_every_decode_step():
    booted, stats, texts = run_arm()
    check_arm_replayed_every_step(
        decode_steps=stats["decode_steps"], replayed=stats["replayed"], reasons=stats["eager"]
    )
    check_no_cold_captures(captures_after_ready=stats["captures_after_ready"])
    assert stats["decode_steps"] == coverage(rows=8, requests=16, gens=LENGTHS).decode_steps
    assert booted["decode"]["warm"]["graphs"] == stats["captures"] == 4  # one width
    assert booted["backend"]["schedule_invariant"] is True
    assert booted["backend"]["reason"]
    assert stats["kernel_compiles_after_ready"] == 0
    assert booted["pool"]["capacity_tokens"] == stats["kv_capacity_tokens"]
    assert booted["rows"] == "compact"
    assert (stats["running"], stats["waiting"], stats["kv_tokens"]) == (0, 0, 0)
    assert texts == run_arm("--no-cuda-graphs")[2]


def test_without_kernels_every_decode_step_is_replayed_too_and_no_promise_is_made():
    booted, stats, texts = run_arm("--no-kernels")
    check_arm_replayed_every_step(
        decode_steps=stats["decode_steps"], replayed=stats["replayed"], reasons=stats["eager"]
    )
    assert booted["decode"]["warm"]["graphs"] == stats["captures"] == 4 * 2
    assert booted["backend"]["schedule_invariant"] is False
    assert len(texts) == 16


def test_steps_launched_ahead_are_replayed_too_and_say_the_same():
    _, stats, texts = run_arm("--overlap")
    check_arm_replayed_every_step(
        decode_steps=stats["decode_steps"], replayed=stats["replayed"], reasons=stats["eager"]
    )
    check_no_cold_captures(captures_after_ready=stats["captures_after_ready"])
    assert stats["steps_ahead"] > stats["decode_steps"] // 2
    assert (stats["running"], stats["waiting"], stats["kv_tokens"]) == (0, 0, 0)
    assert texts == run_arm()[2]


def test_gathered_rows_replay_every_decode_step_without_a_move():
    _, stats, _ = run_arm("--gather-rows")
    check_arm_replayed_every_step(
        decode_steps=stats["decode_steps"], replayed=stats["replayed"], reasons=stats["eager"]
    )
    assert stats["moves"] == 0


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_gate_rejects_the_served_arm_without_a_persistent_batch():
    _, stats, _ = run_arm("--no-persistent-batch")
    with pytest.raises(GateError, match="gate warmup.arm_replayed_every_step: .* scattered rows"):
        check_arm_replayed_every_step(
            decode_steps=stats["decode_steps"], replayed=stats["replayed"], reasons=stats["eager"]
        )
