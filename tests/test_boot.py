"""From arguments to a serving process: the port first, the engine that was named, and a clean end."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fast.engine import Engine as FastEngine
from reference.request import Request, SamplingParams, generate
from serve import boot
from serve.boot import as_option, base_url, build_engine, example, listen
from serve.cli import build_parser, main
from serve.models import load_model

ENGINES = ["reference", "fast"]


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny-random")


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """`nanoserve serve` as a process: it, its base URL, and the example command it printed."""
    command = [sys.executable, "-m", "serve", "serve", "--model", "tiny-random", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line, curl = process.stdout.readline(), process.stdout.readline()
        assert line.startswith("serving on http://127.0.0.1:"), process.communicate()[1]
        yield process, line.split()[2], curl.strip()
    finally:
        process.kill()
        process.communicate()


def post(url: str, body: dict) -> dict:
    """The JSON answer to a JSON body."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


# holds


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_named_engine_is_built_and_runs(tiny, engine: str, dtype: torch.dtype) -> None:
    built = build_engine(tiny, engine=engine, max_batch_size=2, max_model_len=64, dtype=dtype)
    assert type(built).__module__ == f"{engine}.engine"
    assert built.max_model_len == 64
    answer = generate(built, [Request((1, 2, 3), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))])[0]
    assert (len(answer.token_ids), answer.finish_reason) == (4, "length")


def test_memory_budget_sizes_the_pool(tiny) -> None:
    per_token = tiny.config.kv_elements_per_token * 4
    built = build_engine(tiny, max_batch_size=4, block_size=16, kv_cache_bytes=per_token * 16 * 5)
    assert built.stats()["kv_capacity_tokens"] == 80
    assert built.max_model_len == 80


def test_lowered_limit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--model", "tiny-random", "--prompt", "x", "--max-tokens", "2", "--kv-cache-memory", "64KiB"]
    assert main(argv) == 0
    assert "note: a request may have 128 tokens, not 2,048" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ENGINES)
def test_served_process_answers_and_ends_cleanly(engine: str) -> None:
    with served("--engine", engine, "--served-model-name", "my model") as (process, url, curl):
        body = {"model": "my model", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}
        assert post(f"{url}/completions", body)["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        with urllib.request.urlopen(f"{url}/models", timeout=60) as reply:
            assert [model["id"] for model in json.load(reply)["data"]] == ["my model"]
        done = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert f"{engine} engine in float32" in err
        assert err.endswith("stopped\n")
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [("127.0.0.1", 80, "http://127.0.0.1:80"), ("0.0.0.0", 81, "http://127.0.0.1:81"), ("::", 82, "http://[::1]:82")],
)
def test_printed_url_is_one_a_client_can_use(host: str, port: int, url: str) -> None:
    class Bound:
        def getsockname(self) -> tuple[str, int]:
            return host, port

    assert base_url(Bound()) == url


def test_example_matches_what_the_model_can_do() -> None:
    assert "/v1/chat/completions" in example("http://x", "m", chat=True)
    assert "/v1/completions" in example("http://x", "m", chat=False)


# rejects


def test_port_in_use_is_known_before_the_model_is_read(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def never(args: argparse.Namespace) -> None:
        raise AssertionError("the model was read first")

    monkeypatch.setattr(boot, "boot", never)
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", "tiny-random", "--port", str(port)]) == 1
    line = capsys.readouterr().err
    assert line == f"nanoserve serve: --port: {port} is in use on 127.0.0.1; name another, or 0 for a free one\n"


def test_failed_boot_gives_the_port_back(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert main(["serve", "--model", "no-such-model", "--port", str(port)]) == 2
    listen("127.0.0.1", port).close()


def test_host_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match=r"--host 192\.0\.2\.1, --port 0: "):
        listen("192.0.2.1", 0)


def test_unknown_engine_is_refused(tiny) -> None:
    with pytest.raises(ValueError, match="engine: 'slow' is not one of fast, reference"):
        build_engine(tiny, engine="slow")


@pytest.mark.parametrize(
    ("contract", "option"),
    [
        ("max_tokens: 0 is not an integer", "--max-tokens: 0 is not an integer"),
        ("kv_bytes: 1 is too small", "--kv-cache-memory: 1 is too small"),
        ("two things: went wrong", "two things: went wrong"),
        ("no field", "no field"),
    ],
)
def test_contract_errors_speak_of_options(contract: str, option: str) -> None:
    assert str(as_option(ValueError(contract))) == option


def test_engine_that_dies_ends_the_process_with_1(tiny, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    class Dying:
        """An engine whose every step raises."""

        max_model_len, has_work = 64, True

        def submit(self, request: Request) -> None: ...

        def abort(self, request_id: str) -> None: ...

        def step(self) -> list:
            raise OverflowError("the pool is on fire")

        def describe(self) -> dict:
            return {}

        def stats(self) -> dict:
            return {"running": 0, "waiting": 0, "kv_tokens": 0, "kv_capacity_tokens": 64}

    monkeypatch.setattr(boot, "boot", lambda args: (tiny, Dying()))
    assert main(["serve", "--port", "0"]) == 1
    assert "the engine died: OverflowError: the pool is on fire" in capsys.readouterr().err


# any order


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_every_engine_option_reaches_the_engine(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict = {}
    monkeypatch.setattr(boot, "build_engine", lambda loaded, **options: seen.update(options) or 1 / 0)
    threads = torch.get_num_threads()
    options = ["--model", "tiny-random", "--engine", "fast", "--max-batch-size", "3", "--block-size", "7"]
    options += ["--kv-cache-memory", "1MiB", "--max-model-len", "99", "--dtype", "float64", "--threads", str(threads)]
    options += ["--no-cuda-graphs", "--persistent-batch", "--warm-rows", "2", "--warm-width", "32"]
    options += ["--width-multiple", "16", "--chunk-tokens", "77", "--no-prefix-cache", "--overlap"]
    prompt = ["--prompt", "x"] if command == "generate" else []
    with pytest.raises(ZeroDivisionError):
        boot.boot(build_parser().parse_args([command, *options, *prompt]))
    assert seen == {
        "engine": "fast",
        "max_batch_size": 3,
        "block_size": 7,
        "kv_cache_bytes": 2**20,
        "max_model_len": 99,
        "chunk_tokens": 77,
        "overlap": True,
        "prefix_cache": False,
        "dtype": torch.float64,
        "width_multiple": 16,
        "warm_rows": 2,
        "warm_width": 32,
        "bucket_decode": False,
        "persist_inputs": False,
        "capture_decode": False,
        "compact_rows": True,
        "gather_rows": False,
        "compile_decode": False,
        "kernels": False,
        "half_weights": False,
        "half_kv": False,
        "threads": None,
        "take_weights": True,
    }


@pytest.mark.parametrize(
    ("flags", "kernels", "half_weights", "half_kv"),
    [
        ([], True, True, False),
        (["--no-kernels"], False, False, False),
        (["--kernels", "--half-kv"], True, True, True),
        (["--no-half-weights"], True, False, False),
        (["--dtype", "float64"], False, False, False),
        (["--block-size", "24"], False, False, False),
        (["--block-size", "24", "--kernels"], True, True, False),
    ],
)
def test_the_command_line_chooses_the_backend(tiny, flags, kernels, half_weights, half_kv) -> None:
    chosen = boot.backend(build_parser().parse_args(["serve", *flags]), tiny)
    threads = torch.get_num_threads() if kernels else None
    assert chosen == {"kernels": kernels, "half_weights": half_weights, "half_kv": half_kv, "threads": threads}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], []),
        (["--warm-rows", "2", "--gather-rows"], []),
        (["--no-cuda-graphs", "--compile", "--warm-rows", "2"], []),
        (["--no-cuda-graphs", "--warm-rows", "2", "--warm-width", "9"], ["--warm-rows has no", "--warm-width has no"]),
        (["--no-cuda-graphs", "--gather-rows"], ["--gather-rows only costs"]),
        (["--engine", "reference", "--warm-rows", "2", "--half-kv"], ["--warm-rows has no", "--half-kv has no"]),
        (["--engine", "reference", "--gather-rows", "--compile"], ["--gather-rows has no", "--compile has no"]),
    ],
)
def test_options_that_change_nothing_are_told(flags, told) -> None:
    notes = boot.without_effect(build_parser().parse_args(["serve", *flags]))
    assert [note.startswith(start) for note, start in zip(notes, told, strict=True)] == [True] * len(told)


def test_weights_are_not_held_beside_the_engines_own_and_the_line_says_what_runs(capsys) -> None:
    args = ["serve", "--model", "tiny-random", "--max-model-len", "64", "--max-batch-size", "2"]
    loaded, engine = boot.boot(build_parser().parse_args(args))
    assert loaded.weights is None
    assert engine.describe()["backend"]["weights"] == "float16"
    told = "fast engine in float32 on kernels (weights float16, K/V float32; schedule invariant), 2 rows"
    assert told in capsys.readouterr().err
    with pytest.raises(ValueError, match="loaded: tiny-random has given its weights"):
        build_engine(loaded)


@pytest.mark.parametrize(("flags", "every"), [([], 64), (["--recheck-every", "5"], 5), (["--no-kernels"], 0)])
def test_one_request_in_so_many_is_computed_again_where_bits_are_promised(flags: list[str], every: int) -> None:
    args = ["serve", "--model", "tiny-random", "--max-model-len", "64", "--max-batch-size", "2", *flags]
    _, engine = boot.boot(build_parser().parse_args(args))
    assert isinstance(engine, FastEngine)
    assert engine.recheck.every == every


def test_kernels_that_cannot_run_are_refused_in_the_words_of_the_option(capsys) -> None:
    argv = ["generate", "--model", "tiny-random", "--prompt", "x", "--block-size", "24"]
    assert main([*argv, "--kernels"]) == 2
    assert "--kernels: True needs a block_size that is a multiple of 16, not 24" in capsys.readouterr().err
    assert main([*argv, "--half-kv"]) == 2
    assert "--half-kv: True needs kernels, which are off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "on"),
    [
        ([], {"capture_decode", "compact_rows"}),
        (["--no-persistent-batch"], {"capture_decode"}),
        (["--no-cuda-graphs"], set()),
        (["--no-cuda-graphs", "--persistent-batch"], {"compact_rows"}),
        (["--gather-rows"], {"capture_decode", "gather_rows"}),
        (["--no-cuda-graphs", "--compile"], {"compile_decode", "bucket_decode"}),
        (["--no-cuda-graphs", "--overlap"], {"overlap"}),
        (["--no-cuda-graphs", "--device", "cuda"], {"overlap"}),
        (["--no-cuda-graphs", "--device", "cuda", "--no-overlap"], set()),
    ],
    ids=["default", "free rows", "eager", "eager persistent", "gather", "compiled", "overlap", "gpu", "gpu in turn"],
)
def test_the_command_line_bundles_the_switches_and_lets_them_apart(flags, on) -> None:
    chosen = boot.switches(build_parser().parse_args(["serve", *flags]))
    bundled = {"bucket_decode", "persist_inputs"} if "capture_decode" in on else set()
    assert {name for name, value in chosen.items() if value} == on | bundled
