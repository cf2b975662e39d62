"""Reads the ELF files in which NVIDIA's compiler stores the code of kernels (cubins). Does not import torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

ELF_MAGIC = b"\x7fELF\x02"  # 64 bits
ABI_OFFSET, FLAGS_OFFSET, SECTIONS_OFFSET, COUNTS_OFFSET = 8, 48, 40, 58
CUDA_13_ABI = 8  # e_flags hold the architecture in bits 8-15; before, in bits 0-7
WITH_SIZE = 4  # format of an attribute in .nv.info that is followed by its size and value
# Attributes with a symbol and a number: bytes of local memory per thread, and registers.
FRAME_SIZE, REGISTER_COUNT = 0x11, 0x2F
WORD_BYTES = 4


class KernelResources(NamedTuple):
    """What the CUDA driver would report about a kernel: registers, and spilled 32-bit words of local memory."""

    registers: int
    spills: int


def architecture(cubin: bytes) -> int:
    """The compute capability that a cubin is compiled for: 90 for 9.0. Raises ValueError for anything else."""
    if cubin[:5] != ELF_MAGIC or len(cubin) < 64:
        raise ValueError("it is not a cubin")
    [flags] = struct.unpack_from("<I", cubin, FLAGS_OFFSET)
    return flags >> 8 & 0xFF if cubin[ABI_OFFSET] >= CUDA_13_ABI else flags & 0xFF


def kernel_resources(cubin: bytes) -> KernelResources:
    """Of the only kernel in a cubin of Triton."""
    registers = frame_bytes = 0
    for attribute, number in _attributes(_section(cubin, ".nv.info")):
        registers = max(registers, number if attribute == REGISTER_COUNT else 0)
        frame_bytes = max(frame_bytes, number if attribute == FRAME_SIZE else 0)
    return KernelResources(registers, frame_bytes // WORD_BYTES)


def _section(cubin: bytes, wanted: str) -> bytes:
    """The content of a section; b"" if there is none of this name."""
    [offset] = struct.unpack_from("<Q", cubin, SECTIONS_OFFSET)
    size, count, names = struct.unpack_from("<HHH", cubin, COUNTS_OFFSET)
    # sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, ...
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + size * index) for index in range(count)]
    strings = headers[names][4]
    for header in headers:
        begin, (start, length) = strings + header[0], header[4:]
        if cubin[begin : cubin.index(b"\0", begin)].decode() == wanted:
            return cubin[start : start + length]
    return b""


def _attributes(content: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, number) of those attributes in .nv.info that belong to a symbol."""
    position = 0
    while position + 4 <= len(content):
        form, attribute, length = struct.unpack_from("<BBH", content, position)
        if form == WITH_SIZE and length >= 2 * WORD_BYTES:
            yield attribute, struct.unpack_from("<I", content, position + 8)[0]
        position += 4 + (length if form == WITH_SIZE else 0)
