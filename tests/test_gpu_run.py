"""`make gpu` before there is a card: it says that it ran nothing, and its benches run through in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import gpu_run
from tests.bench import bench_gpu, gpu_models
from tests.bench.bench_gpu import Clock, table
from tests.bench.gpu_transformers import Sides
from tests.gpu_mode import DEVICE, HAS_TRITON, MARKS

pytestmark = [
    *[mark for mark in MARKS if mark.name != "gpu"],
    pytest.mark.skipif(DEVICE == "cuda", reason="what it would show without a card; `make gpu` is the real run"),
]


# ---- holds --------------------------------------------------------------------------------------------------------


def test_every_part_of_the_bench_runs_and_says_that_it_was_interpreted(tmp_path: Path):
    assert HAS_TRITON
    lines = bench_gpu.run(1e4, tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text()) == lines
    assert lines[0]["interpreted"] is True
    assert not [line for line in lines if line["part"] == "fault"], lines
    assert {"bandwidth", "attention", "decode", "itl", "engine", "compile", "transformers"} < {
        line["part"] for line in lines
    }
    assert len(table(lines).splitlines()) == len(lines)
    replayed = {line["arm"]: line["replayed"] / line["decode_steps"] for line in lines if line["part"] == "itl"}
    graphs = {"graphs, warmed": 1.0, "graphs, overlap": 1.0, "graphs, lazy": 1.0}
    ahead = {line["arm"]: line["steps_ahead"] > 0 for line in lines if line["part"] == "engine"}
    assert ahead == {"in turn": False, "ahead": True}
    assert replayed == graphs | {"eager": 0.0, "torch eager": 0.0, "torch compiled": 0.0}


def test_transformers_holds_the_same_model():
    """The comparison asserts it before it times; here on a tiny one."""
    sides = Sides("tiny", rows=1, new=2, dtype=torch.float32, device=DEVICE, prompt=6)
    lines = list(sides.timed(1, static=False))
    assert [line["arm"] for line in lines] == ["ours, graphs", "transformers eager"]


def test_a_parts_fault_is_told_and_the_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def breaks(clock: Clock, bytes_per_s: float):
        yield {"part": "attention", "ms": 1.0}
        raise RuntimeError("out of memory")

    for name in ("attention", "decode_steps"):
        monkeypatch.setattr(bench_gpu, name, breaks)
    for name in ("token_gaps", "whole_steps", "against_transformers"):
        monkeypatch.setattr(bench_gpu, name, lambda clock: iter(()))
    monkeypatch.setattr(bench_gpu, "compiled_step", lambda clock, rate: iter([{"part": "compile", "left_out": "why"}]))
    lines = bench_gpu.run(1e4, tmp_path / "gpu.json")
    assert [line["part"] for line in lines[2:]] == ["attention", "fault", "attention", "fault", "compile"]
    assert "RuntimeError: out of memory" in table(lines)


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b", "llama-3.1-8b"])
def test_the_models_have_the_sizes_of_their_names(name: str):
    config = gpu_models.MODELS[name]
    weights = gpu_models.step_bytes(config, rows=0, context=0, element_bytes=1)
    unread = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    billions = {"smollm2-135m": 0.1345, "llama-3.2-1b": 1.2358, "llama-3.1-8b": 8.0303}[name]
    assert (weights + unread) / 1e9 == pytest.approx(billions, rel=1e-3)
    a_row = gpu_models.step_bytes(config, rows=1, context=1, element_bytes=2) - 2 * weights
    assert a_row == 2 * config.kv_elements_per_token
    assert gpu_models.fits(name, rows=1, tokens=64, element_bytes=2, free_bytes=2**36)
    assert not gpu_models.fits(name, rows=1, tokens=64, element_bytes=2, free_bytes=2**31)


# ---- rejects ------------------------------------------------------------------------------------------------------


def test_without_a_card_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]):
    assert gpu_run.main([]) == gpu_run.NO_CARD != 0
    assert "sees no CUDA device here, so nothing was run" in capsys.readouterr().out


@pytest.mark.parametrize(("tests", "benches", "status"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (124, 0, 1)])
def test_either_half_that_fails_fails_the_whole(monkeypatch, capsys, tmp_path, tests: int, benches: int, status: int):
    ran, out = [], tmp_path / "gpu.json"
    out.write_text("of an earlier run")

    def runs(command: list[str], *, seconds: float) -> int:
        ran.append(command)
        if "tests.bench.bench_gpu" in command:
            out.write_text(json.dumps([{"part": "bandwidth", "bytes_per_s": 4e12}]))
        assert 0 < seconds <= gpu_run.SECONDS
        return benches if "tests.bench.bench_gpu" in command else tests

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(gpu_run, "_run", runs)
    assert gpu_run.main(["--out", str(out)]) == status
    assert len(ran) == 2, "the benches run even when a test failed"
    for name in gpu_run.TESTS:
        assert f"tests/{name}.py" in ran[0]
        assert (gpu_run.ROOT / "tests" / f"{name}.py").is_file()
    *_, last, rate = capsys.readouterr().out.splitlines()
    assert rate.endswith("4.000e+12 B/s"), "how it went, then the table"
    assert ("FAILED" in last or "ran out of time" in last) == bool(status)
