"""Reads the header of a GGUF file: its metadata, and the name, type, shape and bytes of each tensor.

The layout of a file. Numbers are little-endian, and strings begin with their length (8 bytes):

    "GGUF", version (4 bytes), number of tensors and of metadata entries (8 bytes each)
    entries: key, type (4 bytes), value
    tensors: name, number of dimensions (4), dimensions (8 each, the last one first), type (4), offset of the data (8)
    padding to `general.alignment` (32 if it is missing), and the data

A model may be split into several files, each with a header of its own tensors; the metadata of the model is in the
first. Arrays of metadata, such as the tokenizer's vocabulary, are read only by `read_gguf_metadata`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tcdeploy.errors import ModelError, UnsupportedModelError
from tcdeploy.models.json_files import LFS_HINT, LFS_POINTER

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # equal but for big-endian files
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
# Formats of scalars in metadata, by type
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
DAMAGED_HINT = "download the file again"


class StoredType(NamedTuple):
    """columns: values in a block of num_bytes. dtype: as safetensors names it; "" for blocks of several values."""

    name: str
    columns: int
    num_bytes: int
    dtype: str = ""


# By the number in the file
TYPES = {
    0: StoredType("F32", 1, 4, "F32"), 1: StoredType("F16", 1, 2, "F16"), 30: StoredType("BF16", 1, 2, "BF16"),
    2: StoredType("Q4_0", 32, 18), 3: StoredType("Q4_1", 32, 20), 6: StoredType("Q5_0", 32, 22),
    7: StoredType("Q5_1", 32, 24), 8: StoredType("Q8_0", 32, 34), 10: StoredType("Q2_K", 256, 84),
    11: StoredType("Q3_K", 256, 110), 12: StoredType("Q4_K", 256, 144), 13: StoredType("Q5_K", 256, 176),
    14: StoredType("Q6_K", 256, 210), 20: StoredType("IQ4_NL", 32, 18), 23: StoredType("IQ4_XS", 256, 136),
    39: StoredType("MXFP4", 32, 17),
}  # fmt: skip
TYPES_BY_NAME = {kind.name: kind for kind in TYPES.values()}
OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 40: "NVFP4",
}  # fmt: skip
TYPE_HINT = "use a file of the same model in another type, such as Q4_K_M, Q6_K, Q8_0 or BF16"


class GgufTensor(NamedTuple):
    """Bytes [begin, end) of the file. shape: of the values, in torch's order."""

    name: str
    type: StoredType
    shape: tuple[int, ...]
    begin: int
    end: int


class GgufFile(NamedTuple):
    """metadata: without arrays. header_bytes: of the file before the padding."""

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    header_bytes: int


def read_gguf(path: Path) -> GgufFile:
    """The header of a file. Raises ModelError if it is damaged or has an unknown version or type, and OSError."""
    stat = path.stat()
    return _read_gguf(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=64)  # shards; a start needs each header several times, and reads it in 0.2 s
def _read_gguf(path: Path, size: int, mtime_ns: int) -> GgufFile:
    return _parse(path, keeps_arrays=False)


def read_gguf_metadata(path: Path) -> Mapping[str, Any]:
    """All metadata of a file, arrays as lists. Raises as `read_gguf`."""
    return _parse(path, keeps_arrays=True).metadata


def read_f32_tensor(path: Path, tensor: GgufTensor) -> list[float]:
    """The values of a small tensor. Raises OSError."""
    with path.open("rb") as file:
        file.seek(tensor.begin)
        return [*struct.unpack(f"<{math.prod(tensor.shape)}f", file.read(tensor.end - tensor.begin))]


def _parse(path: Path, keeps_arrays: bool) -> GgufFile:
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER.encode():
            raise ModelError(f"{path} is a Git LFS pointer, not the weights", LFS_HINT)
        if not start.startswith(MAGIC):
            raise ModelError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}", DAMAGED_HINT)
        with contextlib.closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as content:
            try:
                return _Header(path, content, keeps_arrays).read()
            except (struct.error, UnicodeDecodeError, OverflowError, RecursionError):
                raise ModelError(
                    f"{path} is damaged: its header ends early or has invalid text", DAMAGED_HINT
                ) from None


class _Header:
    """A position in the header of a file."""

    def __init__(self, path: Path, content: mmap.mmap, keeps_arrays: bool) -> None:
        self._path, self._content, self._at = path, content, len(MAGIC)
        self._keeps_arrays = keeps_arrays

    def read(self) -> GgufFile:
        version, num_tensors, num_entries = self._numbers("IQQ")
        if version not in VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            described = "is big-endian" if is_swapped else f"has version {version} of GGUF"
            raise UnsupportedModelError(f"{self._path} {described}, which is not supported", "convert the model again")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key, (kind,) = self._string(), self._numbers("I")
            metadata[key] = self._value(kind)
        described_tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r:.20}")
        start = -(-self._at // alignment) * alignment
        tensors = tuple(
            tensor._replace(begin=start + tensor.begin, end=start + tensor.end) for tensor in described_tensors
        )
        self._check(tensors, alignment)
        return GgufFile({key: value for key, value in metadata.items() if value is not None}, tensors, self._at)

    def _check(self, tensors: tuple[GgufTensor, ...], alignment: int) -> None:
        """Raise ModelError for a tensor that occurs twice, shares bytes with another or is outside of the file."""
        names: set[str] = set()
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.begin):
            if tensor.name in names:
                raise self._damaged(f"it has the tensor {tensor.name} twice")
            if tensor.begin < end or tensor.begin % alignment:
                raise self._damaged(f"{tensor.name} overlaps another tensor or is not aligned")
            if tensor.end > len(self._content):
                raise self._damaged(f"it ends before the end of {tensor.name}")
            names.add(tensor.name)
            end = tensor.end

    def _tensor(self) -> GgufTensor:
        """With bytes that are counted from the beginning of the data."""
        name, (num_dimensions,) = self._string(), self._numbers("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise self._damaged(f"{name} has {num_dimensions} dimensions")
        shape = tuple(reversed(self._numbers(f"{num_dimensions}Q")))
        number, offset = self._numbers("IQ")
        if number not in TYPES:
            described = f"the type {OTHER_TYPES.get(number, number)}, which is not supported"
            raise UnsupportedModelError(f"{name} in {self._path} has {described}", TYPE_HINT)
        kind = TYPES[number]
        if not shape or 0 in shape or shape[-1] % kind.columns:
            raise self._damaged(f"{name} of the type {kind.name} has the shape {[*shape]}")
        return GgufTensor(name, kind, shape, offset, offset + math.prod(shape) // kind.columns * kind.num_bytes)

    def _value(self, kind: int) -> Any:
        """The value; None for an array that is not kept."""
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._numbers(self._scalar(kind))[0]
        kind, count = self._numbers("IQ")
        if self._keeps_arrays:
            return [self._value(kind) for _ in range(count)]
        if kind == STRING:
            self._skip_strings(count)
        elif kind == ARRAY:
            for _ in range(count):
                self._value(kind)
        else:
            self._at += count * struct.calcsize(f"<{self._scalar(kind)}")
        return None

    def _skip_strings(self, count: int) -> None:
        """A call for each string took 0.2 s with the 400,000 of a vocabulary, so the loop has none."""
        content, at, length_of = self._content, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + length_of(content, at)[0]
        self._at = at

    def _scalar(self, kind: int) -> str:
        if kind not in SCALARS:
            raise self._damaged(f"a value of its metadata has the unknown type {kind}")
        return SCALARS[kind]

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        """Raises struct.error at the end of the file."""
        numbers = struct.unpack_from(f"<{kinds}", self._content, self._at)
        self._at += struct.calcsize(f"<{kinds}")
        return numbers

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        text = self._content[self._at : self._at + length]
        if len(text) != length:
            raise struct.error
        self._at += length
        return text.decode()

    def _damaged(self, problem: str) -> ModelError:
        return ModelError(f"{self._path} is damaged: {problem}", DAMAGED_HINT)
