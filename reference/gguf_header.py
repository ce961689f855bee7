"""The header of a GGUF file: metadata as plain Python values, and where each tensor's bytes lie.

It is parsed here rather than by `gguf.GGUFReader`, which makes several numpy arrays for every token of a vocabulary
and takes seconds where this takes a tenth of one. It knows the container alone: no model, no quantisation arithmetic.
Source: the GGUF specification, versions 2 and 3, in ggml's docs/gguf.md.

Proof: tests/test_gguf.py. Story: model.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from reference.weights import WeightsError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "|b1",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as it lies in the file. `shape` is torch's order, rows first; offset and length are in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything before the tensor bytes: metadata by key, tensors by name."""

    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Parse the header of `path`.

    Raises:
        WeightsError: naming the file and what is wrong: not GGUF, a version we do not read, cut short, a tensor
            whose bytes are not all there, a type nobody here knows.
        FileNotFoundError: no such file.
    """
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise WeightsError(f"{path}: not a GGUF file (it does not begin with {MAGIC!r})")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(path, data))


def _parse(cursor: _Cursor) -> GGUFHeader:
    version = cursor.integer("<I")
    # A big-endian file shows its version in the upper half, so it is refused here too.
    if version not in VERSIONS:
        raise cursor.error(f"GGUF version {version} is not one of {', '.join(map(str, VERSIONS))}")
    num_tensors, num_fields = cursor.integer("<Q"), cursor.integer("<Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.text("a metadata key")
        if key in fields:
            raise cursor.error(f"metadata key {key!r} appears twice")
        fields[key] = cursor.value(key)
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise cursor.error(f"general.alignment: {alignment!r} is not a positive integer")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise cursor.error(f"tensor {name!r} appears twice")
        tensors[name] = _located(cursor, name, shape, kind, start + offset)
    return GGUFHeader(fields, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("a tensor name")
    num_dims = cursor.integer("<I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {num_dims} dimensions, 1 to {MAX_DIMS} are allowed")
    # ggml writes the fastest-running dimension first; torch names it last.
    shape = tuple(reversed([cursor.integer("<Q") for _ in range(num_dims)]))
    return name, shape, cursor.integer("<I"), cursor.integer("<Q")


def _located(cursor: _Cursor, name: str, shape: tuple[int, ...], kind_id: int, offset: int) -> GGUFTensor:
    try:
        kind = GGMLQuantizationType(kind_id)
    except ValueError:
        raise cursor.error(f"tensor {name!r} has the unknown type {kind_id}") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_elements:
        raise cursor.error(f"tensor {name!r}: rows of {shape[-1]} are not whole {kind.name} blocks of {block_elements}")
    num_bytes = math.prod(shape) // block_elements * block_bytes
    if offset + num_bytes > cursor.size:
        raise cursor.error(f"tensor {name!r} ends at byte {offset + num_bytes} of a file of {cursor.size}: cut short")
    return GGUFTensor(name, shape, kind, offset, num_bytes)


class _Cursor:
    """A position in the file; every read is checked against its end, so a damaged count cannot ask for memory."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = len(MAGIC)

    def error(self, message: str) -> WeightsError:
        return WeightsError(f"{self.path}: {message}")

    def take(self, num_bytes: int) -> bytes:
        """The next bytes, or an error where the file ends before them."""
        end = self.position + num_bytes
        if end > self.size:
            raise self.error(f"the header asks for bytes up to {end} of a file of {self.size}: cut short")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def integer(self, layout: str) -> int:
        return int(struct.unpack(layout, self.take(struct.calcsize(layout)))[0])

    def text(self, what: str) -> str:
        piece = self.take(self.integer("<Q"))
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason}") from None

    def value(self, key: str) -> Any:
        """The value behind `key`: a number, a bool, a string, or a list of one of these."""
        kind = self._kind(key)
        if kind is not GGUFValueType.ARRAY:
            return self._values(key, kind, 1)[0]
        kind = self._kind(key)
        if kind is GGUFValueType.ARRAY:
            raise self.error(f"metadata key {key!r} is an array of arrays, which no field of a model is")
        return self._values(key, kind, self.integer("<Q"))

    def _kind(self, key: str) -> GGUFValueType:
        kind_id = self.integer("<I")
        try:
            return GGUFValueType(kind_id)
        except ValueError:
            raise self.error(f"metadata key {key!r} has the unknown type {kind_id}") from None

    def _values(self, key: str, kind: GGUFValueType, count: int) -> list[Any]:
        if kind is GGUFValueType.STRING:
            return [self.text(f"a string of {key!r}") for _ in range(count)]
        layout = np.dtype(NUMBERS[kind])
        values: list[Any] = np.frombuffer(self.take(count * layout.itemsize), layout).tolist()
        return values
