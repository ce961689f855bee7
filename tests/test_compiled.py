"""The compiled arm: same tokens, a bounded number of compilations, none of them in front of a client.

Backend `eager` traces and counts like any other and compiles nothing, so counts are seconds; inductor is one slow test.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fast.compiled import CompiledDecode
from fast.engine import Engine
from fast.model import Forward
from gates import GateError
from gates.compiled import check_compiles_bounded, check_no_compiles_after_ready
from reference.request import Request, SamplingParams
from tests.harness import SHAPES, TINY, tiny_weights

SIZES = {"max_batch_size": 4, "num_blocks": 40, "block_size": 4, "max_model_len": 48, "width_multiple": 16}
COMPILED = {"bucket_decode": True, "compile_decode": True, "compile_backend": "eager"}
CAPTURED = {"persist_inputs": True, "capture_decode": True, "compact_rows": True}
ANSWERS = [SamplingParams(max_tokens=n, temperature=0.7, seed=n, ignore_eos=True) for n in (4, 8, 16, 32)]
# Inductor imports parts of torch that torch itself has deprecated.
INDUCTOR = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")


def engine(shape: str = "gqa", **switches) -> Engine:
    return Engine.build(SHAPES[shape], tiny_weights(shape), **(SIZES | switches))


def answers(built: Engine, requests: int = 8) -> list[list[int]]:
    prompts = [Request((7, 11, 13, i), ANSWERS[i % len(ANSWERS)], f"r{i}") for i in range(requests)]
    return [completion.token_ids for completion in built.generate(prompts)]


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_pieces_give_the_tokens_of_the_forward(shape):
    built = engine(shape, **COMPILED)
    built.warm_decode()
    assert answers(built) == answers(engine(shape))
    # Nothing but the row count is baked in: layers, widths and steps share one graph a piece.
    assert built.stats()["compiles"] == 3 * len(built.decode.buckets.row_sizes) == 3 * 3
    assert built.decode.compiled.compiled_steps == 3 + built.stats()["decode_steps"]  # 3 of them warm-up
    assert not built.stats()["uncompiled"]


@pytest.mark.parametrize(("rows", "sizes"), [(1, 1), (3, 3), (8, 4), (300, 10)])
def test_compilations_follow_the_row_buckets_past_the_compilers_own_limit(rows, sizes):
    built = engine("llama3_rope", **COMPILED, max_batch_size=rows, num_blocks=rows * 12)
    built.warm_decode()
    assert built.stats()["compiles"] == 3 * sizes


@pytest.mark.parametrize(("captured", "gather"), list(product([False, True], repeat=2)))
def test_compiling_composes_with_recordings_and_gathered_rows(captured, gather):
    switches = (CAPTURED if captured else {}) | {"gather_rows": gather, "compact_rows": captured and not gather}
    built = engine(**COMPILED, **switches)
    report = built.warm_decode()
    assert answers(built) == answers(engine())
    assert built.stats()["compiles"] == 9
    assert built.stats()["replayed"] == (built.stats()["decode_steps"] if captured else 0)
    assert (report.graphs > 0) == captured
    assert "9 graphs by eager, 3 pieces x 3 row counts" in built.decode.describe()["compile_decode"]


def test_a_trimmed_warm_list_still_compiles_every_row_bucket():
    built = engine(**COMPILED, **CAPTURED)
    assert built.warm_decode(max_rows=1).graphs == 3
    assert built.stats()["compiles"] == 9
    assert answers(built) == answers(engine())
    assert built.stats()["compiles"] == 9


def test_a_row_count_unseen_at_ready_runs_as_it_is_written_and_is_counted():
    built = engine(**COMPILED)
    built.decode.compiled.ready()  # too early: nothing was compiled before it
    assert answers(built) == answers(engine())
    stats = built.stats()
    assert stats["uncompiled"] == {"unseen row count": stats["decode_steps"]}
    assert stats["compiles"] == 0


def test_without_a_warm_up_pieces_are_compiled_as_they_come():
    built = engine(**COMPILED)
    assert answers(built, requests=1) == answers(engine(), requests=1)
    assert built.stats()["compiles"] == 3  # one row all along


def test_warming_writes_the_sink_and_nothing_else():
    built = engine(**COMPILED)
    built.warm_decode()
    for pool in [*built.cache.k, *built.cache.v]:
        assert not pool[: built.cache.sink_slot].any()
        assert pool[built.cache.sink_slot].any()


@INDUCTOR
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gqa", "biases", "qk_norm"])
def test_inductor_gives_the_tokens_of_the_forward(shape):
    built = engine(shape, **COMPILED | {"compile_backend": "inductor"}, **CAPTURED)
    built.warm_decode()
    assert answers(built) == answers(engine(shape))
    assert built.stats()["compiles"] == 9
    assert built.stats()["replayed"] == built.stats()["decode_steps"]


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_compiling_without_buckets_is_refused():
    with pytest.raises(ValueError, match="compile_decode: True needs bucket_decode"):
        engine(compile_decode=True, compile_backend="eager")


def test_a_backend_that_cannot_compile_is_refused_at_build_by_name():
    def no_compiler(graph, example_inputs):
        raise RuntimeError("no g++ here\nand a page of traceback")

    torch._dynamo.register_backend(no_compiler, name="no_compiler")
    with pytest.raises(
        ValueError, match=r"compile_decode: True needs .* 'no_compiler' .*C\+\+ compiler.*no g\+\+ here"
    ):
        engine(**COMPILED | {"compile_backend": "no_compiler"})
    with pytest.raises(ValueError, match=r"compile_decode: True needs .* 'gcc-next'"):
        engine(**COMPILED | {"compile_backend": "gcc-next"})


@INDUCTOR
@pytest.mark.slow
def test_a_machine_without_a_compiler_is_refused_at_build(monkeypatch):
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr(config.cpp, "cxx", ("/nowhere/g++",))
    with pytest.raises(ValueError, match=r"compile_decode: True needs .* 'inductor' .*No working C.. compiler found"):
        engine(**COMPILED | {"compile_backend": "inductor"})


def test_linears_that_hide_their_weights_are_refused():
    weights = tiny_weights()

    def packed(weight, bias):
        return lambda x: torch.nn.functional.linear(x, weight, bias)

    forward = Forward(TINY, weights, max_positions=16, linear=packed)
    with pytest.raises(ValueError, match="compile_decode: True needs linears whose tensors can be arguments"):
        CompiledDecode(forward, row_sizes=(1,), backend="eager")


def test_gate_rejects_a_piece_that_bakes_in_its_layer():
    built = engine(**COMPILED)
    compiled = built.decode.compiled
    # The real fault: one layer's norm has another layout, so its guard fails and the piece is compiled once more.
    before, after = compiled._weights[1]
    compiled._weights[1] = (torch.stack([before[0], before[0]], 1)[:, 0], *before[1:]), after
    with pytest.raises(GateError, match="gate compiled.bounded: 4 compilations, 3 pieces x 1 row counts"):
        built.warm_decode()
    with pytest.raises(GateError, match="something besides the row count"):
        check_compiles_bounded(compiles=4, pieces=3, row_sizes=(1,))


def test_gate_rejects_a_compilation_in_front_of_a_client():
    built = engine(**COMPILED)
    built.warm_decode(max_rows=1)
    compiled = built.decode.compiled
    before, after = compiled._weights[0]
    compiled._weights[0] = (torch.stack([before[0], before[0]], 1)[:, 0], *before[1:]), after
    built.submit(Request((3, 4), ANSWERS[1], "a"))
    built.step()
    with pytest.raises(GateError, match="gate compiled.none_after_ready: 1 compilations after ready, 0 may"):
        built.step()
    with pytest.raises(GateError):
        check_no_compiles_after_ready(compiles_after_ready=1)


# ---- any order --------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(
    asked=st.lists(st.tuples(st.integers(1, 17), st.integers(1, 12), st.integers(0, 99)), min_size=1, max_size=7),
    gather=st.booleans(),
)
def test_any_batch_gets_the_tokens_it_gets_uncompiled(asked: list[tuple[int, int, int]], gather: bool):
    def run(built: Engine) -> list[list[int]]:
        requests = [
            Request(tuple(range(3, 3 + prompt)), SamplingParams(max_tokens=gen, temperature=0.9, seed=seed), str(at))
            for at, (prompt, gen, seed) in enumerate(asked)
        ]
        return [completion.token_ids for completion in built.generate(requests)]

    built = engine(**COMPILED, num_blocks=12, gather_rows=gather)
    built.warm_decode()
    assert run(built) == run(engine(num_blocks=12))
    assert built.stats()["compiles"] == 9
    assert not built.stats()["uncompiled"]
