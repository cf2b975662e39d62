"""Run Triton kernels without a GPU, record their launches, and compile a recorded launch for Hopper.

On a GPU the tests run the compiled kernels. Without one they run the same source in Triton's numpy interpreter
(`triton_interpreter`). Triton's compiler needs no GPU, so shared memory, PTX and specialisation are checked everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import triton.backends.nvidia
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.compiler import compile as triton_compile
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction, create_function_from_signature, mangle_type

from tcdeploy.kernels.experts import scheme_gemv_kernel
from tcdeploy.kernels.linear import scheme_codes
from tcdeploy.torch_compat.triton.kernel import Kernel
from tests.sass import unwritten_registers

HOPPER = GPUTarget("cuda", 90, 32)
HOPPER_SHARED_BYTES = 227 * 1024
_TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
}  # fmt: skip

HAS_GPU = torch.cuda.is_available()
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")])
CPU = pytest.param(
    "cpu", id="cpu-interpreted", marks=pytest.mark.skipif(HAS_GPU, reason="the compiled kernels run on the GPU instead")
)


@contextmanager
def triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run kernels in numpy, on CPU tensors, until the block ends and the patches are undone.

    TRITON_INTERPRET is read when `@triton.jit` decorates a function, including Triton's own `tl.max` and `tl.cdiv`: it
    decides for the whole process, and fails if Triton was imported before. This redirects the decorated functions
    instead. It also works around faults of the interpreter: a jitted function called from a kernel leaves
    `triton.language` patched; dots, sums, products and conversions from integers of bfloat16, which numpy lacks,
    compute with the bit patterns, and subnormal bfloat16 becomes zero; Triton 3.6 cannot loop with numpy 2.4.
    Conversions to and from FP8, which it rounds wrongly, are those of torch. It also skips two costs, a quarter of the
    run time: overflow checks, whose result the interpreter discards unless `debug` is set, and the construction of a
    table in each call of `_get_np_dtype`.
    """

    interpret = functools.cache(interpreter.InterpretedFunction)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return interpret(self.fn).run(*args, grid=grid, warmup=warmup, **kwargs)

    def call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        return interpret(self.fn)(*args, **kwargs)

    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *rest)

    binary_op, cast_impl = interpreter.InterpreterBuilder.binary_op, interpreter.InterpreterBuilder.cast_impl

    def calculate(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16 or operation not in (np.add, np.subtract, np.multiply):
            return binary_op(self, left, right, operation)
        wide = (self.cast_impl(value, tl.float32) for value in (left, right))
        return self.cast_impl(binary_op(self, *wide, operation), tl.bfloat16)

    def cast(self: Any, value: Any, dtype: Any) -> Any:
        if value.dtype.scalar == tl.bfloat16 and dtype.scalar == tl.float32:
            return interpreter.TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if dtype.scalar == tl.bfloat16 and value.dtype.scalar.is_int():
            value = cast_impl(self, value, tl.float32)
        return cast_impl(self, value, dtype)

    convert_float = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        """In FP8, values beyond the largest are NaN, so that a kernel which does not clamp them fails."""
        if tl.float8e4nv not in (source, target):
            return convert_float(data, source, target, rounding_mode)
        values = torch.from_numpy(data.copy()).view(_TORCH_DTYPES[source])
        converted = values.to(_TORCH_DTYPES[target])
        if target == tl.float8e4nv:
            converted = converted.where(values.float().abs() < 464, torch.tensor(float("nan")).to(converted.dtype))
        bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[converted.dtype.itemsize]
        return converted.view(bits).numpy()

    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    uncached = interpreter._get_np_dtype
    cached = functools.cache(uncached)  # pointer types are not hashable
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    monkeypatch.setattr(
        interpreter, "_get_np_dtype", lambda dtype: (uncached if dtype.scalar.is_ptr() else cached)(dtype.scalar)
    )

    original_attributes = set(vars(tl.tensor))
    patched = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patched.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    monkeypatch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "binary_op", calculate)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(JITFunction, "__call__", call)
    for module in (scheme_codes, scheme_gemv_kernel):
        monkeypatch.setattr(module, "HAS_PTX", tl.constexpr(False))
    try:
        yield
    finally:
        patched.restore()
        for name in set(vars(tl.tensor)) - original_attributes:  # Triton 3.6 leaves a __repr__
            delattr(tl.tensor, name)


@pytest.fixture(params=[CPU, CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of the kernels' tests: a GPU, or the CPU with Triton's interpreter."""
    if request.param == "cuda":
        yield "cuda"
    else:
        with triton_interpreter(monkeypatch):
            yield "cpu"


class Launch(NamedTuple):
    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, int]


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record kernel launches in the returned list instead of running them."""
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: int) -> None:
        launches.append(Launch(self, args, options))

    monkeypatch.setattr(JITFunction, "run", run)
    return launches


def record_prefetches(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, kernel_module: Any, launching_module: Any
) -> list[np.ndarray]:
    """Let the interpreter run a kernel as with PDL, and record the address of each byte that a prefetch covers."""
    addresses: list[np.ndarray] = []

    def prefetch_rows(rows: Any, COLUMNS: int) -> None:  # noqa: N803 - the name of the constexpr
        size = COLUMNS * rows.dtype.element_ty.primitive_bitwidth // 8
        addresses.append(rows.handle.data.reshape(-1, 1) + np.arange(size, dtype=np.uint64))

    launch = kernel.launch
    monkeypatch.setattr(kernel_module, "prefetch_rows", prefetch_rows)
    monkeypatch.setattr(launching_module, "supports_pdl", lambda _: True)
    monkeypatch.setattr(kernel, "launch", lambda *args, launch_pdl, **options: launch(*args, **options))
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(tl.extra.cuda, name, lambda: None)
    return addresses


def compile_for_hopper(launch: Launch, runs_ptxas: bool = True) -> CompiledKernel:
    """Compile a recorded launch for a Hopper GPU, and check it for faults of Triton and ptxas.

    No wgmma may read what the next step overwrites, no shared address may be part of descriptors of two swizzles, and
    no instruction may read a uniform register before it is written (sass.py).

    `runs_ptxas`: False omits ptxas, which takes a quarter of the time. The kernel then has PTX and metadata but no
    binary, and the last check is omitted.
    """
    compiled = _compile_for_hopper(launch, runs_ptxas)
    unsafe = addresses_of_two_swizzles(compiled.asm["ptx"])
    if not launch.kernel.is_gluon():
        unsafe += overwritten_operands(compiled)
    elif runs_ptxas:  # it waits for products itself, so that only the machine code shows what runs meanwhile
        unsafe += overwritten_registers(machine_code(compiled)) + overwritten_copies(compiled)
    if runs_ptxas:
        unsafe += unwritten_registers(compiled.asm["cubin"])
    assert not unsafe, f"{launch.kernel.fn.__name__}: {unsafe}"
    return compiled


def overwritten_operands(compiled: CompiledKernel) -> list[str]:
    """The operands of products in loops that the next step may overwrite while the tensor cores still read them.

    - In registers: the product is not awaited before they are written for the next step (triton-lang/triton#9433).
    - In shared memory, with more than four warps: after it has waited for its own products, a warp group starts copies
      without a barrier (triton-lang/triton#11047).
    """
    lines, unsafe = compiled.asm["ttgir"].splitlines(), []
    for i, line in enumerate(lines):
        product = re.search(r"ttng\.warp_group_dot (%\w+).*#ttg\.dot_op", line)
        if product is None:
            continue
        following = next((later for later in lines[i + 1 :] if "ttng." in later), "")
        loop = max((j for j in range(i) if "scf.for" in lines[j]), default=i)
        made = max((j for j in range(i) if re.match(rf"\s*{product[1]}(:\d+)? =", lines[j])), default=i)
        is_awaited = "warp_group_dot_wait" in following and "pendings = 0" in following
        if not is_awaited and not any("pendings = 0" in between for between in lines[loop:made]):
            unsafe.append(f"registers of {product[1]}")
    return unsafe + overwritten_copies(compiled)


def overwritten_copies(compiled: CompiledKernel) -> list[str]:
    """Copies that start after a wait of this warp group for its own products, without a barrier between them."""
    if compiled.metadata.num_warps <= 4:
        return []
    waits = re.findall(r"wgmma\.wait_group\S* [1-9]|bar\.sync|barrier\.sync|cp\.async\.c[ag]", compiled.asm["ptx"])
    return ["shared memory" for wait, then in zip(waits, waits[1:], strict=False) if "wait" in wait and "cp" in then]


class Instruction(NamedTuple):
    """An instruction of a GPU's machine code."""

    address: int
    name: str
    operands: list[str]


def machine_code(compiled: CompiledKernel) -> list[Instruction]:
    """The instructions of a kernel, without their predicates."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(\S+)\s*(.*?)\s*;", text)
    assert found, text
    return [Instruction(int(address, 16), name, operands.split(", ")) for address, name, operands in found]


def overwritten_registers(code: list[Instruction]) -> list[str]:
    """Instructions that write registers from which the tensor cores may still read an operand.

    Each loop is followed twice, since the products of one iteration run into the next.
    """
    unsafe, running, last = [], [], []  # operands of groups of products, and of the group that is not complete
    position, repeated = 0, set()
    while position < len(code):
        address, name, operands = code[position]
        position += 1
        if name.startswith("HGMMA"):
            last += [*_registers(operands[1], 4)]
            if "gsb0" in operands:
                running, last = [*running, last], []
        elif name.startswith("WARPGROUP.DEPBAR"):
            running = running[max(len(running) - int(operands[1], 16), 0) :]
        elif name == "BRA" and int(operands[-1], 16) < address and address not in repeated:
            repeated.add(address)
            position = next(i for i, item in enumerate(code) if item.address == int(operands[-1], 16))
        elif written := {*_registers(operands[0], _width(name))} & {*sum(running, last)}:
            unsafe.append(f"{name} at {address:#x} writes registers {sorted(written)}")
    return unsafe


def _registers(operand: str, count: int) -> range:
    number = re.match(r"R(\d+)", operand)
    return range(int(number[1]), int(number[1]) + count) if number else range(0)


def _width(name: str) -> int:
    """The number of registers that an instruction writes."""
    if name.endswith((".128", ".M88.4")):
        return 4
    return 2 if ".64" in name or ".WIDE" in name or name == "CS2R" else 1


def addresses_of_two_swizzles(ptx: str) -> list[str]:
    """The registers whose sums with constants are descriptors of different swizzles (wgmma operands; bits 62 and 63).

    ptxas 12.8 computes some of these sums from registers that it does not write, or that hold something else.
    """
    swizzles: dict[str, set[int]] = {}
    for address, constant in re.findall(r"(?:or\.b64|add\.s64)\s+%rd\d+, (%rd\d+), (-?\d+);", ptx):
        swizzles.setdefault(address, set()).add(int(constant) >> 62 & 3)
    return [f"descriptors from {address}" for address, kinds in swizzles.items() if len(kinds - {0}) > 1]


def _compile_for_hopper(launch: Launch, runs_ptxas: bool) -> CompiledKernel:
    """Specialised as Triton would: pointers and sizes are divisible by 16."""
    signature, constants, hints = {}, {}, {}
    for i, (param, arg) in enumerate(zip(launch.kernel.params, launch.args, strict=True)):
        if param.is_constexpr or arg is None:
            signature[param.name], constants[i,] = "constexpr", arg
        else:
            signature[param.name] = mangle_type(arg)
            is_divisible = isinstance(arg, Tensor) or (isinstance(arg, int) and arg % 16 == 0)
            if is_divisible and not param.do_not_specialize:
                hints[i,] = [["tt.divisibility", 16]]
    source = (GluonASTSource if launch.kernel.is_gluon() else ASTSource)(launch.kernel, signature, constants, hints)
    if runs_ptxas:
        return triton_compile(source, target=HOPPER, options=launch.options)
    with (
        tempfile.TemporaryDirectory() as cache,  # the kernel without a binary must not be found later
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache),
        mock.patch.object(CUDABackend, "make_cubin", lambda *_: b""),
    ):
        return triton_compile(source, target=HOPPER, options=launch.options)


def shared_memory_on_hopper(launch: Launch) -> int:
    """Bytes of shared memory per program of a recorded launch."""
    return compile_for_hopper(launch, runs_ptxas=False).metadata.shared


def spilled_bytes(ptx: str, folder: Path) -> int:
    """Bytes of spill stores and spill loads per thread that ptxas reports for Hopper, summed over the functions."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    ptxas = Path(triton.backends.nvidia.__path__[0]) / "bin" / "ptxas"
    command = [str(ptxas), "-v", "--gpu-name=sm_90a", str(source), "-o", str(folder / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill", report)
    assert spills, report
    return sum(map(int, spills))


def specialization_key(launch: Launch) -> tuple[str, str]:
    """The kernel's name and its specialisation: a launch with a new key compiles again."""
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, make_backend(HOPPER))
    return launch.kernel.fn.__name__, str(bind(*launch.args, **launch.options)[1:])
