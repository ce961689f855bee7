"""An environment for each peer, and the model in the form it reads; what fails is a reason, and no end of the run.

Everything lies in one folder (`.venv-peers` by default): `<peer>/` an environment, `models/` converted models,
`logs/` what the installers said. An environment is reused until its requirements change.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
INSTALL_SECONDS = 3600
UNFIT = {"vllm": ("torchvision", "torchaudio", "torchcodec")}  # built for another torch than its own


class Unavailable(RuntimeError):
    """A peer that cannot take part; the message is the reason."""


@dataclass(frozen=True)
class Arm:
    """One line of the comparison: a peer, how it is set up, and the arm of ours it is held against."""

    name: str
    peer: str  # module `<peer>_peer`, and environment
    prepare: Callable[[Path, Path], Path]  # (home, model folder) -> what the peer loads
    against: str = "nanoserve"
    long: bool = False  # takes part at long contexts
    options: dict[str, str] = field(default_factory=dict)
    note: str = ""


def interpreter(arm: Arm, home: Path) -> str:
    """The Python that runs this arm, its environment made when it is not there yet.

    Raises:
        Unavailable: pip could not install it; the reason is pip's last line.
    """
    requirements = HERE / f"requirements-{arm.peer}.txt"
    if not requirements.is_file():
        return sys.executable  # the project's own environment has what it needs
    folder = home.absolute() / arm.peer
    python, stamp = folder / "bin" / "python", folder / ".installed"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest and python.exists():
        return str(python)
    log = home / "logs" / f"install-{arm.peer}.log"
    print(f"installing {arm.peer} into {folder}, log in {log}", file=sys.stderr)
    if not python.exists():
        run([sys.executable, "-m", "venv", str(folder)], log, seconds=INSTALL_SECONDS)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "-r", str(requirements)], log, seconds=INSTALL_SECONDS)
    if arm.peer in UNFIT:
        run([*pip, "uninstall", "-y", *UNFIT[arm.peer]], log, seconds=INSTALL_SECONDS)
    stamp.write_text(digest)
    return str(python)


def as_it_is(home: Path, model: Path) -> Path:
    """The Hugging Face folder itself."""
    return model


def as_openvino(home: Path, model: Path) -> Path:
    """Exported with fp16 weights."""
    out = home.absolute() / "models" / f"{model.name}-openvino-fp16"
    if not (out / "openvino_model.xml").is_file():
        command = [str(home.absolute() / "openvino" / "bin" / "python"), "-m", "optimum.commands.optimum_cli"]
        command += ["export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
        part = out.with_name(f"{out.name}.part")
        run([*command, "--weight-format", "fp16", str(part)], home / "logs" / "export.log", seconds=INSTALL_SECONDS)
        part.replace(out)
    return out


def as_gguf_float32(home: Path, model: Path) -> Path:
    """A GGUF file in float32."""
    return _gguf(home, model, half=False)


def as_gguf_float16(home: Path, model: Path) -> Path:
    """A GGUF file whose matrices are halves."""
    return _gguf(home, model, half=True)


def _gguf(home: Path, model: Path, *, half: bool) -> Path:
    from tests.bench.peers.gguf_writer import write_gguf

    out = home.absolute() / "models" / f"{model.name}-{'f16' if half else 'f32'}.gguf"
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(model, out, half=half)
    return out


def run(command: list[str], log: Path, *, seconds: float, pin: frozenset[int] | None = None, threads: int = 0) -> str:
    """Run a process to its end and give its output; what it said on stderr is in `log`.

    `pin` holds it to these processors, `threads` is told to every library that asks.

    Raises:
        Unavailable: it could not be started, took too long or failed; the reason is the last line it said.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    if threads:
        env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    before = os.sched_getaffinity(0)
    try:
        if pin is not None:
            os.sched_setaffinity(0, pin)  # which the child inherits
        with log.open("w") as errors:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=env, timeout=seconds
            )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"not done after {seconds:.0f} s") from None
    except OSError as error:
        raise Unavailable(str(error)) from None
    finally:
        os.sched_setaffinity(0, before)
    if done.returncode:
        said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        said = said or [line for line in done.stdout.splitlines() if line.strip()]
        raise Unavailable(f"exit status {done.returncode}: {said[-1][:300] if said else 'it said nothing'}")
    return done.stdout


ARMS = (
    Arm("nanoserve", "nanoserve", as_it_is, long=True, note="fp16 weights, float32 K/V"),
    Arm(
        "nanoserve-half-kv",
        "nanoserve",
        as_it_is,
        long=True,
        options={"kv": "float16"},
        note="fp16 weights, float16 K/V",
    ),
    Arm(
        "openvino-f32-kv",
        "openvino",
        as_openvino,
        long=True,
        options={"kv": "float32"},
        note="fp16 weights, float32 arithmetic and K/V",
    ),
    Arm(
        "openvino-default-kv",
        "openvino",
        as_openvino,
        against="nanoserve-half-kv",
        long=True,
        note="fp16 weights, float32 arithmetic, its default 8-bit K/V",
    ),
    Arm("vllm", "vllm", as_it_is, note="CPU build, float32, compiled"),
    Arm("llama.cpp-f32", "llama", as_gguf_float32, note="float32 weights, its default float16 K/V"),
    Arm("llama.cpp-f16", "llama", as_gguf_float16, note="float16 weights, its default float16 K/V"),
    Arm("transformers", "transformers", as_it_is, note="float32"),
)
