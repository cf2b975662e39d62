"""Reads tensors from safetensors and GGUF files straight into tensors that exist already, with several threads.

A safetensors file is an 8-byte length, a JSON header with the dtype, shape and byte range of each tensor, and the
tensors. A GGUF file has a binary header with the same facts (gguf_file.py). Its tensors get the names that transformers
expects, and blocks of quantised values are rows of bytes. A `StoredTensor` describes a tensor of either file.

On a CPU a thread reads into the target's memory, for a GPU into a page-locked buffer that it copies to the device.
Meanwhile the main thread imports packages or captures steps, so the threads make few calls that need the GIL. Only a
tensor that is converted is held in host memory as a whole. Imports neither transformers nor safetensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.errors import ModelError
from tcdeploy.models.weights.gguf_file import read_gguf
from tcdeploy.models.weights.gguf_names import named_tensors
from tcdeploy.models.weights.weight_paths import GGUF_SUFFIX
from tcdeploy.torch_compat.triton.cuda_driver import copy_to_gpu, use_primary_context

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 << 20  # the limit of safetensors
CHUNK_BYTES = 32 << 20
THREADS = 8
# GIL switch interval during reading. With Python's default of 5 ms, a thread waits up to 5 ms several times per chunk.
SWITCH_SECONDS = 0.0005
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor in a file: bytes [begin, end) from the start of the file.

    block_type: the type of GGUF's blocks of quantised values, such as "Q4_K". Then dtype and shape are those of rows of
    bytes. "" for tensors of plain numbers.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    block_type: str = ""

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def rows(self, begin: int, end: int) -> StoredTensor:
        """Rows [begin, end) of the first dimension."""
        row_bytes = (self.end - self.begin) // self.shape[0]
        first = self.begin + begin * row_bytes
        return self._replace(shape=(end - begin, *self.shape[1:]), begin=first, end=first + (end - begin) * row_bytes)

    def view(self, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
        """The same bytes as another dtype. Raises ValueError if `shape` has another number of bytes."""
        if math.prod(shape) * dtype.itemsize != self.num_bytes:
            raise ValueError(f"{self.num_bytes} bytes are not {dtype} {[*shape]}")
        return self._replace(dtype=dtype, shape=shape)


class Copy(NamedTuple):
    """Read `source` into `target`, which is contiguous and has the same shape; convert it if the dtypes differ.

    evaluate: if not None, it computes the values of `target` and of the `others` instead, in a thread; `source` is then
        only one of the stored tensors that it reads, which have `evaluated_bytes` in all.
    """

    source: StoredTensor
    target: Tensor
    evaluate: Callable[[], Sequence[Tensor]] | None = None
    evaluated_bytes: int = 0
    others: tuple[Tensor, ...] = ()


@dataclass
class ReadTotal:
    """What was read from the files, and how long it took; zero until it has ended."""

    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0


def read_header(path: Path) -> bytes:
    """The header of a GGUF file, or the JSON header of a safetensors file. Raises ModelError or OSError."""
    if path.suffix == GGUF_SUFFIX:
        with path.open("rb") as file:
            return file.read(read_gguf(path).header_bytes)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = file.read(min(length, MAX_HEADER_BYTES))
    if not length or len(header) != length:
        raise ModelError(f"{path} is damaged: it has no safetensors header", "download the file again")
    return header


def stored_tensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of several files by name, without those whose dtype is not in DTYPES. Raises as `read_header`.

    paths: all safetensors files, or all GGUF files of a model.
    """
    paths = [*paths]
    if paths and paths[0].suffix == GGUF_SUFFIX:
        return _gguf_tensors(paths)
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        header = read_header(path)
        start = LENGTH_BYTES + len(header)
        for name, entry in json.loads(header).items():
            if name != "__metadata__" and entry["dtype"] in DTYPES:
                begin, end = entry["data_offsets"]
                shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
                if end - begin != math.prod(shape) * dtype.itemsize:
                    raise ModelError(f"{path} is damaged: {name} has {end - begin} bytes", "download the file again")
                tensors[name] = StoredTensor(str(path), dtype, shape, start + begin, start + end)
    return tensors


def _gguf_tensors(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for path, name, tensor in named_tensors(paths):
        kind, rows = tensor.type, tensor.shape[:-1]
        if kind.dtype:
            dtype, shape, block_type = DTYPES[kind.dtype], tensor.shape, ""
        else:
            row_bytes = tensor.shape[-1] // kind.columns * kind.num_bytes
            dtype, shape, block_type = torch.uint8, (*rows, row_bytes), kind.name
        tensors[name] = StoredTensor(str(path), dtype, shape, tensor.begin, tensor.end, block_type)
    return tensors


def read_tensor(stored: StoredTensor) -> Tensor:
    """A stored tensor in host memory. Raises ModelError if the file is too short."""
    return read_elements(stored, 0, math.prod(stored.shape)).view(stored.shape)


def read_elements(stored: StoredTensor, first: int, max_elements: int) -> Tensor:
    """Elements of a stored tensor in host memory, flat. Raises ModelError if the file is too short."""
    begin = stored.begin + first * stored.dtype.itemsize
    count = min((stored.end - begin) // stored.dtype.itemsize, max_elements)
    content = torch.empty(count * stored.dtype.itemsize, dtype=torch.uint8)
    descriptor = os.open(stored.path, os.O_RDONLY)
    try:
        _read(descriptor, memoryview(content.numpy().data), begin, stored.path)
    finally:
        os.close(descriptor)
    return content.view(stored.dtype)


def equal_tensors(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two stored tensors of one dtype have equal shapes and values. Reads them in threads, in chunks.

    Raises as `read_elements`.
    """
    if first.shape != second.shape:
        return False

    def is_equal(begin: int) -> bool:
        elements = (read_elements(stored, begin, count) for stored in (first, second))
        return torch.equal(*(item.view(torch.uint8) if item.dtype.itemsize == 1 else item for item in elements))

    count = CHUNK_BYTES // first.dtype.itemsize
    with ThreadPoolExecutor(THREADS) as threads:
        return all(threads.map(is_equal, range(0, math.prod(first.shape), count)))


@contextlib.contextmanager
def copying_tensors(copies: Iterable[Copy], stop: threading.Event | None = None) -> Iterator[ReadTotal]:
    """Read all tensors into their targets while the block runs. Targets and total are valid after a normal exit.

    If the block raises, or `stop` is set, the remaining chunks are skipped, and targets and total are invalid. A failed
    read sets `stop`. All targets are on one device. Raises ModelError if a file is too short, DriverError and OSError.
    """
    tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
    targets: list[Tensor] = []
    total, num_bytes = ReadTotal(), 0
    for copy in sorted(copies, key=lambda copy: (copy.source.path, copy.source.begin)):
        targets.append(copy.target)
        num_bytes += copy.evaluated_bytes if copy.evaluate else copy.source.num_bytes
        for task in _tasks(copy):
            tasks.put(task)
    if not targets:
        yield total
        return
    device, stop = targets[0].device, stop or threading.Event()
    # The threads copy on streams of their own: earlier work on the targets' memory has to end before, and all copies
    # before the targets are used or freed.
    _synchronize(device)
    switch_interval, start = sys.getswitchinterval(), time.perf_counter()
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            sys.setswitchinterval(SWITCH_SECONDS)
            all_started = threading.Event()
            try:
                workers = [pool.submit(_run_tasks, tasks, device, stop, all_started) for _ in range(THREADS)]
            finally:
                all_started.set()
            try:
                yield total
                wait(workers)
            except BaseException:  # also KeyboardInterrupt during the wait
                stop.set()
                raise
        total.seconds = max(worker.result() for worker in workers) - start
        total.num_bytes = num_bytes
    finally:
        sys.setswitchinterval(switch_interval)
        _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Task(NamedTuple):
    """Copy the file's bytes from `begin` into `target`, which is a view [bytes] uint8.

    With `evaluate`, `target` and `others` are the tensors themselves, which get the results.
    """

    source: StoredTensor
    begin: int
    target: Tensor
    evaluate: Callable[[], Sequence[Tensor]] | None = None
    others: tuple[Tensor, ...] = ()


def _tasks(copy: Copy) -> Iterator[_Task]:
    source, target, evaluate, _, others = copy
    if evaluate:
        yield _Task(source, source.begin, target, evaluate, others)
        return
    elements = target.view(-1)
    if target.dtype != source.dtype:
        count = CHUNK_BYTES // max(target.dtype.itemsize, source.dtype.itemsize)
        for first in range(0, len(elements), count):
            read = partial(_read_elements, source, first, count)
            yield _Task(source, source.begin, elements[first : first + count], read)
        return
    content = elements.view(torch.uint8)
    for start in range(0, len(content), CHUNK_BYTES):
        yield _Task(source, source.begin + start, content[start : start + CHUNK_BYTES])


def _read_elements(source: StoredTensor, first: int, max_elements: int) -> list[Tensor]:
    return [read_elements(source, first, max_elements)]


def _run_tasks(
    tasks: queue.SimpleQueue[_Task], device: torch.device, stop: threading.Event, all_started: threading.Event
) -> float:
    """Returns the time at which it has read its last chunk, by time.perf_counter."""
    # Creating a thread blocks while another allocates page-locked memory (0.1 s), so all are created first.
    all_started.wait()
    with contextlib.ExitStack() as stack:
        descriptors: dict[str, int] = {}
        staging = _CudaStaging(device) if device.type == "cuda" else None
        try:
            while not stop.is_set():
                try:
                    source, begin, target, evaluate, others = tasks.get_nowait()
                except queue.Empty:
                    break
                if evaluate is not None:
                    for values, computed in zip(evaluate(), (target, *others), strict=True):
                        if staging is not None:
                            staging.copy(values.to(computed.dtype), computed)
                        else:
                            computed.copy_(values)
                    continue
                if source.path not in descriptors:
                    descriptors[source.path] = os.open(source.path, os.O_RDONLY)
                    stack.callback(os.close, descriptors[source.path])
                descriptor = descriptors[source.path]
                if staging is not None:
                    staging.read(descriptor, target, begin, source.path)
                else:
                    _read(descriptor, memoryview(target.numpy().data), begin, source.path)
        except BaseException:
            stop.set()
            raise
    return time.perf_counter()


class _CudaStaging:
    """A page-locked buffer and a stream of one thread."""

    def __init__(self, device: torch.device) -> None:
        use_primary_context(torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(device)
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        self._view, self._address = memoryview(self._buffer.numpy().data), self._buffer.data_ptr()

    def read(self, descriptor: int, target: Tensor, begin: int, path: str) -> None:
        """Copy the bytes of a file to `target` [bytes] uint8, which are at most CHUNK_BYTES."""
        _read(descriptor, self._view[: target.numel()], begin, path)
        self._send(target)

    def copy(self, values: Tensor, target: Tensor) -> None:
        """Copy a tensor in host memory to one of the same dtype and shape.

        `Tensor.copy_` would use the default stream, which a graph capture in another thread does not permit.
        """
        content = values.contiguous().view(-1).view(torch.uint8)
        for chunk, piece in zip(
            content.split(CHUNK_BYTES), target.view(-1).view(torch.uint8).split(CHUNK_BYTES), strict=True
        ):
            self._buffer[: len(chunk)] = chunk
            self._send(piece)

    def _send(self, target: Tensor) -> None:
        """Fill `target` from the beginning of the buffer, and wait until it is done."""
        copy_to_gpu(target.data_ptr(), self._address, target.numel(), self._stream.cuda_stream)


def _read(descriptor: int, view: memoryview, begin: int, path: str) -> None:
    """Fill `view` with the file's bytes from offset `begin`. Raises ModelError if the file ends before, and OSError."""
    while view:
        count = os.preadv(descriptor, [view], begin)
        if not count:
            raise ModelError(f"{path} is damaged: it ends before its last tensor", "download the file again")
        view, begin = view[count:], begin + count
