"""Compiled Triton kernels that are launched without Triton.

Triton compiles a kernel once for each combination of the types of its arguments, of properties such as "divisible by
16", and of its constants. A *binary* is one of these. `KernelRecorder` writes the binaries of a process to a file, and
`StoredKernels` finds the binary for a launch by the same rules, those of Triton 3.6 and 3.7, and launches it through
the CUDA driver (cuda_driver.py). Kernels that need scratch memory, clusters or a cooperative launch are not recorded;
none of tcdeploy's kernels needs them. Does not import Triton.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tcdeploy.torch_compat.internal import find, internal, mentions
from tcdeploy.torch_compat.triton.cuda_driver import LoadedKernel

SCHEMA = 2
PARAMETER, COMPILED_KERNEL = "triton.runtime.jit:KernelParam", "triton.compiler:CompiledKernel"
ALIGNMENT = 16  # Triton specialises on this divisor of addresses and integers
# How Triton specialises on a parameter, one letter each.
CONSTANT, SPECIALISED, UNALIGNED, NOT_SPECIALISED = "c", "s", "u", "n"
SLOT_BYTES = 8  # of each argument
# By the type in Triton's signature: the format of `struct` that fills a slot.
SLOTS = {"i1": "?7x", "u1": "?7x", "i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q", "fp32": "f4x", "fp64": "d"}
POINTER_SLOT = "Q"
SCRATCH_ARGUMENTS = 2  # pointers that Triton's launcher passes after all others; null for our kernels
UNSUPPORTED = {"num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}


@internal(
    "stored kernels", "triton.compiler.CompiledKernel",
    "on a GPU, starts from packages launch our kernels through Triton, whose import and set-up take a second",
)  # fmt: skip
def supported() -> bool:
    properties = ("is_constexpr", "do_not_specialize", "do_not_specialize_on_alignment")
    parameter = find(PARAMETER)
    return all(hasattr(parameter, name) or mentions(parameter, name) for name in properties) and mentions(
        find(COMPILED_KERNEL), "metadata", "asm", "src"
    )


@dataclass(frozen=True)
class KernelBinary:
    """One compiled binary: what the CUDA driver needs to launch it."""

    symbol: str  # the kernel's name in the cubin
    types: tuple[str, ...]  # of the parameters, as in Triton's signature; "constexpr" for those that are compiled in
    num_warps: int
    shared_bytes: int  # dynamic shared memory of one thread block
    uses_pdl: bool  # whether it is launched with PDL (pdl.py)
    cubin: str  # in base64


class KernelRecorder:
    """The binaries that were launched, by kernel and key."""

    def __init__(self) -> None:
        self._is_supported = supported()
        self._specializations: dict[str, str] = {}
        self._binaries: dict[str, dict[str, KernelBinary]] = {}

    def add(self, name: str, function: Any, args: Sequence[Any], options: Mapping[str, Any], compiled: Any) -> None:
        """Record a launch: Triton's JITFunction, the arguments, and the CompiledKernel that was launched."""
        if not self._is_supported:
            return
        try:
            specializations = self._specializations.get(name) or "".join(map(_specialization, function.params))
            key = launch_key(specializations, args, options)
            if key in self._binaries.get(name, {}):
                return
            binary = _make_binary(compiled)
        except (AttributeError, KeyError, TypeError):  # another version of Triton
            return
        if binary is not None:
            self._specializations[name] = specializations
            self._binaries.setdefault(name, {})[key] = binary

    def to_json(self) -> str:
        """The content of a file for `StoredKernels`; "" if nothing was recorded."""
        kernels = {
            name: {
                "specializations": self._specializations[name],
                "binaries": {key: dataclasses.asdict(item) for key, item in items.items()},
            }
            for name, items in self._binaries.items()
        }
        return json.dumps({"schema": SCHEMA, "kernels": kernels}) if kernels else ""


class StoredKernels:
    """Launches the kernels of a file. A binary is loaded at its first launch."""

    def __init__(self, text: str, load: Any = LoadedKernel) -> None:
        """`load`: makes a kernel (tests replace it). Raises ValueError, KeyError or TypeError for any other text."""
        values = json.loads(text)
        if values["schema"] != SCHEMA:
            raise ValueError(f"schema {values['schema']}")
        self._load = load
        self._specializations: dict[str, str] = {
            name: kernel["specializations"] for name, kernel in values["kernels"].items()
        }
        self._binaries = {
            (name, key): KernelBinary(**{**item, "types": tuple(item["types"])})
            for name, kernel in values["kernels"].items()
            for key, item in kernel["binaries"].items()
        }
        self._loaded: dict[tuple[str, str], _LoadedBinary] = {}

    def launch(self, name: str, grid: tuple[int, ...], args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Launch a kernel on the current stream. Returns whether a binary fits. Raises DriverError."""
        key = (name, launch_key(self._specializations.get(name, ""), args, options))
        loaded = self._loaded.get(key)
        if loaded is None:
            binary = self._binaries.get(key)
            if binary is None:
                return False
            loaded = self._loaded[key] = _LoadedBinary(binary, self._load)
        loaded.launch(grid, args)
        return True


class _LoadedBinary:
    def __init__(self, binary: KernelBinary, load: Any) -> None:
        device = torch.cuda.current_device()
        self._kernel = load(base64.b64decode(binary.cubin), binary.symbol, binary.shared_bytes, device)
        self._num_warps, self._uses_pdl = binary.num_warps, binary.uses_pdl
        self._passed = [index for index, kind in enumerate(binary.types) if kind != "constexpr"]
        slots = [_slot(binary.types[index]) for index in self._passed] + [POINTER_SLOT] * SCRATCH_ARGUMENTS
        self._layout = struct.Struct("<" + "".join(slots))
        self._addresses = ctypes.c_void_p * len(slots)
        self._offsets = [SLOT_BYTES * index for index in range(len(slots))]

    def launch(self, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        values = [value.data_ptr() if isinstance(value := args[index], Tensor) else value for index in self._passed]
        arguments = ctypes.create_string_buffer(self._layout.size)
        self._layout.pack_into(arguments, 0, *values, *[0] * SCRATCH_ARGUMENTS)
        start = ctypes.addressof(arguments)
        addresses = self._addresses(*[start + offset for offset in self._offsets])
        x, y, z = (*grid, 1, 1)[:3]
        if x * y * z:
            stream = torch.cuda.current_stream().cuda_stream
            self._kernel.launch((x, y, z), self._num_warps, self._uses_pdl, stream, addresses)


def launch_key(specializations: str, args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """The key of a launch. Two launches have equal keys exactly if Triton would use one compiled kernel for both.

    `specializations`: a letter for each parameter (CONSTANT, ...).
    """
    return " ".join(
        [*map(_argument_key, specializations, args), *(f"{name}={value}" for name, value in options.items())]
    )


def _argument_key(kind: str, value: Any) -> str:
    if value is None or kind == CONSTANT:
        return repr(value)
    if isinstance(value, Tensor):
        is_aligned = kind == SPECIALISED and value.data_ptr() % ALIGNMENT == 0
        return f"{value.dtype}/{ALIGNMENT}" if is_aligned else str(value.dtype)
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if kind != NOT_SPECIALISED and value == 1:
            return "1"
        bits = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        return f"{bits}/{ALIGNMENT}" if kind == SPECIALISED and value % ALIGNMENT == 0 else bits
    return type(value).__name__


def _specialization(parameter: Any) -> str:
    if parameter.is_constexpr:
        return CONSTANT
    if parameter.do_not_specialize:
        return NOT_SPECIALISED
    return UNALIGNED if parameter.do_not_specialize_on_alignment else SPECIALISED


def _make_binary(compiled: Any) -> KernelBinary | None:
    """None if the kernel needs what this module does not support."""
    types, metadata = tuple(compiled.src.signature.values()), compiled.metadata
    if any(getattr(metadata, name, value) not in (value, None) for name, value in UNSUPPORTED.items()):
        return None
    if not all(kind == "constexpr" or _slot(kind) for kind in types):
        return None
    cubin = base64.b64encode(compiled.asm["cubin"]).decode()
    uses_pdl = bool(getattr(metadata, "launch_pdl", False))
    return KernelBinary(metadata.name, types, metadata.num_warps, metadata.shared, uses_pdl, cubin)


def _slot(kind: Any) -> str:
    """The format of an argument's slot; "" for a type that is not supported."""
    return POINTER_SLOT if str(kind).startswith("*") else SLOTS.get(str(kind), "")
