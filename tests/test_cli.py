"""The command line: what it prints, how it refuses, and that both engines say the same through it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.engine import Engine
from reference.request import Event, Request, SamplingParams
from reference.tokenizer import ByteTokenizer, IncrementalDecoder
from serve.answer import Answer
from serve.chat import Conversation, talk
from serve.cli import main
from serve.generate import Continuation
from serve.models import load_model
from serve.options import integers, num_bytes, program
from tests.wheels import write_gguf

TINY = ["--model", "tiny-random"]
ENGINES = ["reference", "fast"]


def run(*argv: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "serve", *argv]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


def generated(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    """The JSON object that `generate --json` prints last."""
    assert main(["generate", *TINY, "--json", *argv]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a bad argument gets on stderr, with exit status 2."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("nanoserve")]
    assert out == ""
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny-random")


@pytest.fixture
def conversation(tiny) -> Conversation:
    engine = Engine(tiny.config, tiny.weights, max_model_len=160)
    return Conversation(engine, tiny.tokenizer, SamplingParams(max_tokens=8, temperature=0), system=None)


def typed(conversation: Conversation, *lines: str) -> tuple[str, str]:
    """What a person who types these lines sees: the answers, and the notes about them."""
    out, notes = io.StringIO(), io.StringIO()
    talk(conversation, lines=iter(lines), out=out, notes=notes)
    return out.getvalue(), notes.getvalue()


# holds


@pytest.mark.differential
@pytest.mark.parametrize(
    "options",
    [
        ["--prompt", "The amber lamp", "--temperature", "0"],
        ["--prompt-ids", "1,2,3", "--temperature", "0", "--repetition-penalty", "1.3", "--logit-bias", "7:2.5"],
        ["--prompt", "x", "--temperature", "0.9", "--seed", "-5", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"],
    ],
)
def test_both_engines_generate_the_same_ids(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    results = [generated(capsys, "--engine", engine, "--max-tokens", "20", *options) for engine in ENGINES]
    assert results[0] == results[1]
    assert set(results[0]) == {"prompt_ids", "token_ids", "text", "finish_reason"}


def test_json_text_is_the_decode_of_the_ids(capsys: pytest.CaptureFixture[str], tiny) -> None:
    result = generated(capsys, "--prompt", "é🙂", "--max-tokens", "30", "--temperature", "0", "--ignore-eos")
    assert result["prompt_ids"] == tiny.tokenizer.encode("é🙂")
    assert result["text"] == tiny.tokenizer.decode(result["token_ids"])
    assert (len(result["token_ids"]), result["finish_reason"]) == (30, "length")


def test_text_form_prints_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "The amber", "--max-tokens", "20", "--temperature", "0"]
    result = generated(capsys, *options)
    assert main(["generate", *TINY, *options]) == 0
    assert capsys.readouterr().out == result["text"] + "\n"


@pytest.mark.parametrize("engine", ENGINES)
def test_stop_string_ends_the_text_before_it(capsys: pytest.CaptureFixture[str], engine: str) -> None:
    options = ["--engine", engine, "--prompt", "The amber", "--temperature", "0", "--ignore-eos", "--max-tokens", "20"]
    whole = generated(capsys, *options)
    # Two characters from the middle: a stop that no single byte token spells.
    stop = whole["text"][4:6]
    cut = generated(capsys, *options, "--stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]


@pytest.mark.parametrize("min_tokens", [0, 1, 7, 10, 20])
def test_stop_string_counts_after_min_tokens_as_over_http(
    capsys: pytest.CaptureFixture[str], tiny, min_tokens: int
) -> None:
    options = ["--prompt", "The amber", "--temperature", "0", "--max-tokens", "20", "--ignore-eos"]
    options += ["--min-tokens", str(min_tokens)]
    # The bias leaves one letter, so that the stop is there from the first token on.
    options += ["--logit-bias", "65:100"]
    whole = generated(capsys, *options)
    cut = generated(capsys, *options, "--stop", "A")
    answer = Answer(tiny.tokenizer, SamplingParams(stop=("A",), min_tokens=min_tokens, max_tokens=20))
    for index, token in enumerate(whole["token_ids"]):
        if answer.finish_reason is None:
            answer.push(Event("r", token, "length" if index == 19 else None))
    assert whole["text"] == "A" * 20
    assert (cut["text"], cut["finish_reason"]) == (answer.text, answer.finish_reason)
    assert len(cut["token_ids"]) == answer.num_tokens == min(min_tokens + 1, 20)


@pytest.mark.parametrize("engine", ENGINES)
def test_stop_id_is_emitted_and_not_shown(capsys: pytest.CaptureFixture[str], engine: str) -> None:
    options = ["--engine", engine, "--prompt", "The amber", "--temperature", "0", "--max-tokens", "20"]
    whole = generated(capsys, *options)
    stop = whole["token_ids"][3]
    cut = generated(capsys, *options, "--stop-token-ids", str(stop))
    end = whole["token_ids"].index(stop) + 1
    assert (cut["token_ids"], cut["finish_reason"]) == (whole["token_ids"][:end], "stop")
    assert cut["text"] == ByteTokenizer().decode(whole["token_ids"][: end - 1])


def test_broken_off_continuation_leaves_the_engine_idle(tiny) -> None:
    engine = Engine(tiny.config, tiny.weights)
    answer = Continuation(engine, tiny.tokenizer, Request((1, 2), SamplingParams(max_tokens=50, temperature=0)))
    pieces = iter(answer)
    next(pieces)
    pieces.close()
    assert (answer.finish_reason, engine.has_work) == ("abort", False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rows", "4", "--requests", "8", "--gens", "8,16"], (31, 31, 0, 3, 33)),
        (["--rows", "4", "--requests", "8", "--gens", "8,16", "--no-compact-rows"], (31, 21, 10, 0, 0)),
        (["--rows", "8", "--requests", "16", "--gens", "4,8,16,32", "--prompt-tokens", "4"], (47, 47, 0, 8, 80)),
    ],
)
def test_coverage_prints_the_counts(capsys: pytest.CaptureFixture[str], options: list[str], expected: tuple) -> None:
    assert main(["coverage", *options, "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts == dict(zip(("decode_steps", "replayed", "scattered", "moves", "cells"), expected, strict=True))


def test_model_convert_makes_a_folder_that_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    options = ["--prompt-ids", "5,6", "--max-tokens", "6", "--temperature", "0", "--json"]
    assert main(["model", "convert", str(file), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    assert main(["generate", "--model", str(tmp_path / "out"), *options]) == 0
    converted = capsys.readouterr().out
    assert main(["generate", "--model", str(file), *options]) == 0
    assert capsys.readouterr().out == converted


def test_conversation_remembers_its_turns(conversation: Conversation) -> None:
    out, notes = typed(conversation, "hello", "", "more")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert conversation.messages[0]["content"] == "hello"
    first, second = (message["content"] for message in conversation.messages[1::2])
    assert out == f"{first}\n{second}\n"
    assert notes.count("tokens/s") == 2
    assert conversation.last is not None
    prompt = conversation.tokenizer.decode(conversation.last.request.prompt_ids, skip_special_tokens=False)
    assert "hello" in prompt
    assert "more" in prompt


def test_reset_and_system_begin_anew(conversation: Conversation) -> None:
    _, notes = typed(conversation, "hello", "/reset")
    assert (conversation.messages, "begins anew" in notes) == ([], True)
    typed(conversation, "/system Be brief.", "hello")
    assert conversation.last is not None
    ids = conversation.last.request.prompt_ids
    assert list(ids) == conversation.tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    )


def test_exit_leaves_what_follows_unread(conversation: Conversation) -> None:
    lines = iter(["/exit", "hello"])
    talk(conversation, lines=lines, out=io.StringIO(), notes=io.StringIO())
    assert list(lines) == ["hello"]


def test_full_context_is_said_and_reset_recovers(conversation: Conversation) -> None:
    before = list(conversation.messages)
    out, notes = typed(conversation, "x" * 200)
    assert (out, conversation.messages) == ("", before)
    assert "leave no room for an answer; the context holds 160" in notes
    out, _ = typed(conversation, "/reset", "hi")
    assert out


def test_answer_that_fills_the_context_says_so(conversation: Conversation) -> None:
    # The template writes 23 tokens around the message; 3 are left for the answer.
    conversation.params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    around = len(conversation.tokenizer.apply_chat_template([{"role": "user", "content": ""}]))
    _, notes = typed(conversation, "x" * (157 - around))
    assert "[3 tokens" in notes
    assert "the context is full" in notes


def test_chat_works_over_a_pipe() -> None:
    done = run("chat", *TINY, "--max-tokens", "8", "--seed", "1", stdin="hello\n/nonsense\n/reset\nagain\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens/s") == 2
    assert "/nonsense is not a command" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version_answer_without_torch() -> None:
    script = "import sys; from serve.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(command in done.stdout for command in ("serve", "chat", "generate", "model", "coverage"))
    assert run("--version").stdout.startswith("nanoserve ")


@pytest.mark.model
def test_default_model_answers_sensibly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "The capital of France is", "--max-tokens", "8", "--temperature", "0"]) == 0
    assert "Paris" in capsys.readouterr().out


def test_a_printed_command_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / ".venv" / "bin" / "nanoserve"
    monkeypatch.setattr("sys.executable", str(script.with_name("python")))
    monkeypatch.chdir(tmp_path)
    assert program() == ".venv/bin/python -m serve"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    assert program() == ".venv/bin/nanoserve"
    monkeypatch.setenv("PATH", str(script.parent))
    assert program() == "nanoserve"


# rejects


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--port", "70000"], "nanoserve serve: --port: '70000' is not an integer in 0..65535"),
        (["serve", "--engine", "slow"], "--engine: invalid choice: 'slow'"),
        (["serve", "--kv-cache-memory", "much"], "--kv-cache-memory: 'much' is not a size such as 1GiB"),
        (["serve", "--max-batch-size", "0"], "--max-batch-size: '0' is not an integer in 1..1024"),
        (["generate"], "one of the arguments --prompt --prompt-ids is required"),
        (["generate", "--prompt-ids", "1,,2"], "--prompt-ids: '1,,2' is not a list of integers of at least 0"),
        (["generate", *TINY, "--prompt", "x", "--temperature", "-1"], "--temperature: -1.0 is not a number in [0.0"),
        (["generate", *TINY, "--prompt", "x", "--temperature", "nan"], "--temperature: nan is not a number in [0.0"),
        (["generate", *TINY, "--prompt", "x", "--top-p", "0"], "--top-p: 0.0 is not a number in (0.0, 1.0]"),
        (["generate", *TINY, "--prompt", "x", "--stop", ""], "--stop: ('',) is not up to 16 non-empty strings"),
        (["generate", *TINY, "--prompt", "x", "--seed", str(2**63)], "--seed: '9223372036854775808' is not"),
        (["generate", *TINY, "--prompt-ids", "259"], "--prompt-ids: 259 is not an integer in 0..258"),
        (["generate", *TINY, "--prompt", "x", "--logit-bias", "259:1"], "--logit-bias"),
        (["generate", *TINY, "--prompt", "x", "--max-tokens", "2048"], "--max-tokens: "),
        (["generate", *TINY, "--prompt", "x", "--max-model-len", "1"], "--max-model-len: 1 "),
        (["generate", *TINY, "--prompt", "x", "--kv-cache-memory", "10B"], "--kv-cache-memory: 10 bytes hold 0 tokens"),
        (["generate", "--model", "tiny-randon", "--prompt", "x"], "'tiny-randon' is not a model's name (smollm2-135m"),
        (["model", "get", "gpt-5"], "'gpt-5' cannot be fetched; known: smollm2-135m-instruct"),
        (["coverage", "--rows", "4", "--requests", "8", "--gens", "0"], "--gens: '0' is not a list of integers"),
        (["model"], "the following arguments are required: ACTION"),
        (["sing"], "invalid choice: 'sing'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_argument_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.setenv("NANOSERVE_HOME", str(tmp_path))
    assert message in refused(capsys, *argv)


def test_empty_prompt_without_bos_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    assert "--prompt: '' has no tokens" in refused(capsys, "generate", "--model", str(file), "--prompt", "")


def test_failure_is_one_line_and_exit_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSERVE_HOME", str(tmp_path))
    assert main(["generate", "--prompt", "x"]) == 1
    assert f"run: {program()} model get smollm2-135m-instruct" in capsys.readouterr().err
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert main(["model", "convert", str(broken), str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert str(broken) in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSERVE_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        main(["model", "convert", str(tmp_path / "absent.gguf"), str(tmp_path / "out")])


# any order


@given(ids=st.lists(st.integers(0, 258), max_size=40))
def test_streamed_pieces_join_to_the_whole_text(ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    decoder = IncrementalDecoder(tokenizer)
    assert "".join([decoder.push(token) for token in ids]) + decoder.flush() == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_a_list_of_integers_reads_back(ids: list[int]) -> None:
    assert integers(0)(", ".join(map(str, ids))) == tuple(ids)


@given(count=st.integers(1, 10**6), unit=st.sampled_from([("", 1), ("kib", 2**10), ("MiB", 2**20), ("GB", 10**9)]))
def test_a_size_is_its_count_times_its_unit(count: int, unit: tuple[str, int]) -> None:
    assert num_bytes(f"{count}{unit[0]}") == count * unit[1]
