"""A GGUF file: its metadata, and its tensors dequantised one at a time.

`GGUFFile` is the container, lazily: opening it reads the header and no tensor. It knows no tokenizer; whoever makes
one from a GGUF file reads `fields`. Quantised blocks are turned into float32 by the `gguf` package.

Proof: tests/test_gguf.py. Story: model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reference.gguf_header import GGUFTensor, read_header


class GGUFFile:
    """An open GGUF file.

    `fields` is the metadata by key, as plain Python values: int, float, bool, str, or a list of one of these
    (`fields["tokenizer.ggml.tokens"]` is a `list[str]`). `tensors` says by name what lies in the file.

    Raises:
        WeightsError: the file is not GGUF, or damaged.
        FileNotFoundError: no such file.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(Path(path))
        self.path = Path(path)
        self.fields: dict[str, Any] = header.fields
        self.tensors: dict[str, GGUFTensor] = header.tensors
