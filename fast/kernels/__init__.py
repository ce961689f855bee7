"""Compiled CPU kernels: each file holds a kernel, the naive version that judges it, and nothing of an engine.

Compiled code is kept on disk, in a folder named after the sources of all kernels, since numba looks at one file's age
alone and would keep a loop whose inlined part was edited in another. The folder is in `NUMBA_CACHE_DIR` when that is
set, else beside the sources; where those are read-only it is in the user's cache folder, and at worst a temporary one.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numba


def _candidates() -> Iterator[Path]:
    configured: str = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    if configured:
        yield Path(configured)
        return
    yield Path(__file__).parent / "__pycache__"
    from platformdirs import user_cache_path

    yield user_cache_path("nanoserve") / "kernels"


def _cache_folder() -> Path:
    """The first folder that takes a file. A shared temporary one is no candidate: what is loaded from it runs."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for parent in _candidates():
        folder = parent / f"kernels-{digest.hexdigest()[:12]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
        except OSError:
            continue
    folder = Path(tempfile.mkdtemp(prefix="nanoserve-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# Before any kernel is declared: that is when numba decides where its code will be kept.
numba.config.CACHE_DIR = str(_cache_folder())  # type: ignore[attr-defined]
