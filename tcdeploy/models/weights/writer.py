"""Writes safetensors files tensor by tensor, in any order, so that a model of any size needs the memory of one tensor.

The names, dtypes and shapes of all tensors are known before, so the headers are written first, and each tensor has its
place in a file. safetensors' own `save_file` takes all tensors of a file at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.host.durable import sync_files
from tcdeploy.models.weights.reader import DTYPES, LENGTH_BYTES
from tcdeploy.models.weights.weight_paths import INDEX, WEIGHTS

MAX_FILE_BYTES = 5_000_000_000  # as transformers' save_pretrained
ALIGNMENT_BYTES = 8
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Place(NamedTuple):
    """Where a tensor begins in a file, in bytes."""

    file: str
    begin: int


class TensorWriter:
    """Writes into the files of `writing_tensors`."""

    def __init__(self, specs: Mapping[str, TensorSpec], places: Mapping[str, _Place], files: Mapping[str, int]) -> None:
        """`files`: descriptors by name."""
        self._specs, self._places, self._files = specs, places, files
        self.missing = set(specs)

    def write(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError for a tensor of another dtype or shape, and OSError."""
        spec, place = self._specs[name], self._places[name]
        if (tensor.dtype, tuple(tensor.shape)) != spec:
            raise ValueError(f"{name} is {tensor.dtype} {[*tensor.shape]}, not {spec.dtype} {[*spec.shape]}")
        content = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        begin = place.begin
        while content:
            count = os.pwrite(self._files[place.file], content, begin)
            content, begin = content[count:], begin + count
        self.missing.discard(name)


@contextlib.contextmanager
def writing_tensors(
    folder: Path, specs: Mapping[str, TensorSpec], max_file_bytes: int = MAX_FILE_BYTES
) -> Iterator[TensorWriter]:
    """Create the safetensors files of these tensors, with an index if there are several. All are on disk afterwards.

    The block writes every tensor. Raises ValueError if it leaves one out, and OSError.
    """
    groups = _group(specs, max_file_bytes)
    files = (
        [WEIGHTS] if len(groups) == 1 else [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in _from_1(groups)]
    )
    places: dict[str, _Place] = {}
    with contextlib.ExitStack() as stack:
        descriptors: dict[str, int] = {}
        for file, names in zip(files, groups, strict=True):
            descriptors[file] = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            stack.callback(os.close, descriptors[file])
            header, begins = _layout({name: specs[name] for name in names})
            os.pwrite(descriptors[file], header, 0)
            places |= {name: _Place(file, begin) for name, begin in begins.items()}
        writer = TensorWriter(specs, places, descriptors)
        yield writer
        if writer.missing:
            raise ValueError(f"{len(writer.missing)} tensors were not written: {min(writer.missing)}")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(spec.num_bytes for spec in specs.values())},
            "weight_map": {name: place.file for name, place in sorted(places.items())},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        files.append(INDEX)
    sync_files(folder, files)


def _from_1(groups: Sequence[object]) -> range:
    return range(1, len(groups) + 1)


def _group(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    """Names in groups of at most `max_bytes`, or of one tensor, in the order of the names."""
    groups: list[list[str]] = []
    size = max_bytes + 1
    for name, spec in specs.items():
        if size + spec.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += spec.num_bytes
    return groups


def _layout(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with its length, and where each tensor begins in the file.

    Tensors of wider dtypes come first, so that each is aligned to its dtype.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, begin = dict[str, int](), 0
    for name, spec in sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        begins[name], end = begin, begin + spec.num_bytes
        entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": [*spec.shape], "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT_BYTES)
    first = LENGTH_BYTES + len(header)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header, {name: first + at for name, at in begins.items()}
