"""Sequences in a paged cache, and a way to run Triton kernels on them: what the tests of the kernels share.

With a GPU the tests run the compiled kernels; without one they run the same source in numpy (`triton_interpreter`). All caches
are NaN outside the written slots, and block tables point at NaN blocks past a sequence's end, so that one key too many
shows in every test.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.testing import assert_close
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.compiler import compile as triton_compile
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction, create_function_from_signature, mangle_type

# Absolute and relative: float32 sums in another order; the others round the weights and the output once (8, 11 bits).
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HOPPER = GPUTarget("cuda", 90, 32)


@contextmanager
def triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in numpy, on CPU tensors, until the block ends and the patches are undone.

    TRITON_INTERPRET is read when `@triton.jit` decorates, Triton's own `tl.max` and `tl.cdiv` included: it decides for
    the whole process, or fails if Triton was imported before. So the decorated functions are diverted instead. Three
    faults of the interpreter are mended: a jitted function called from a kernel leaves `triton.language` patched; a dot
    of bfloat16, which numpy lacks, multiplies the bit patterns; Triton 3.6 cannot loop with numpy 2.4.
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

    own = set(vars(tl.tensor))
    patched = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patched.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    monkeypatch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(JITFunction, "__call__", call)
    try:
        yield
    finally:
        patched.restore()
        for name in set(vars(tl.tensor)) - own:  # Triton 3.6 leaves a __repr__
            delattr(tl.tensor, name)


NO_GPU, GPU = not torch.cuda.is_available(), torch.cuda.is_available()
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="needs a GPU")])
CPU = pytest.param(
    "cpu", id="cpu-interpreted", marks=pytest.mark.skipif(GPU, reason="the compiled kernels run instead: a GPU is here")
)


@pytest.fixture(params=[CPU, CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the kernels' tests run on: a GPU, or the CPU with Triton's interpreter."""
    if request.param == "cuda":
        yield "cuda"
    else:
        with triton_interpreter(monkeypatch):
            yield "cpu"


@dataclass(frozen=True)
class Case:
    head_dim: int = 64
    v_head_dim: int = 0  # 0: as head_dim
    group: int = 1
    kv_heads: int = 2
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    def options(self, device: str) -> tuple[float, int, float, Tensor | None]:
        """scale, window, softcap, sinks. The sinks are large enough to take half of the weights and more."""
        sinks = torch.linspace(-1, 5, self.heads, dtype=self.dtype, device=device) if self.sinks else None
        return self.head_dim**-0.5, self.window, self.softcap, sinks


CASES = {
    "heads of 32": Case(head_dim=32, block_size=32),
    "heads of 64, groups of 3": Case(group=3),
    "heads of 80": Case(head_dim=80),
    "heads of 96, groups of 4": Case(head_dim=96, group=4, kv_heads=1),
    "heads of 128, groups of 7": Case(head_dim=128, group=7, kv_heads=1, block_size=32),
    "heads of 256": Case(head_dim=256, kv_heads=1),
    "groups of 8": Case(group=8, kv_heads=1),
    "groups of 17": Case(head_dim=16, group=17, kv_heads=1),
    "blocks larger than a tile": Case(block_size=256),
    "a window of one key": Case(window=1),
    "a window smaller than a tile": Case(group=3, window=7),
    "a window of whole tiles": Case(head_dim=128, window=64, block_size=32),
    "a window across tiles": Case(window=50),
    "a window that decode splits": Case(window=130, sinks=True),
    "a window larger than all": Case(window=5000),
    "softcap": Case(softcap=1.5, group=3),
    "sinks": Case(sinks=True, group=3),
    "sinks, softcap and window": Case(sinks=True, softcap=2.0, window=33, group=2, block_size=32),
    "values smaller than keys": Case(head_dim=96, v_head_dim=32),
    "values larger than keys": Case(head_dim=32, v_head_dim=80),
    "bfloat16": Case(head_dim=128, group=4, dtype=torch.bfloat16),
    "bfloat16, everything": Case(sinks=True, softcap=2.0, window=70, group=3, dtype=torch.bfloat16),
    "bfloat16, heads of 256": Case(head_dim=256, kv_heads=1, group=2, dtype=torch.bfloat16),
    "float16": Case(group=4, dtype=torch.float16),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())

some_models = pytest.mark.parametrize(
    "case",
    [
        Case(head_dim=128, kv_heads=8, group=4, dtype=torch.bfloat16),
        Case(head_dim=256, kv_heads=4, group=2, dtype=torch.bfloat16, window=1024, softcap=50.0),
        Case(head_dim=192, v_head_dim=128, kv_heads=16, dtype=torch.bfloat16, sinks=True),
        Case(head_dim=256, kv_heads=1),
    ],
    ids=["llama", "gemma", "deepseek with sinks", "float32"],
)


class PagedSequences(NamedTuple):
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor

    def slots(self, row: int, start: int, stop: int) -> Tensor:
        """The slots of one sequence's tokens [start, stop)."""
        block_size = self.k_cache.shape[1]
        tokens = torch.arange(start, stop, device=self.block_table.device)
        return self.block_table[row, tokens // block_size].long() * block_size + tokens % block_size


def make_paged_sequences(case: Case, lengths: list[int], device: str) -> PagedSequences:
    """Sequences of these lengths in shuffled blocks; every other slot is NaN, and block 0 is never anyone's."""
    torch.manual_seed(0)
    width = -(-max(lengths) // case.block_size) + 2
    blocks = 1 + torch.randperm(len(lengths) * width, dtype=torch.int32)
    in_use = torch.arange(width) * case.block_size < torch.tensor(lengths)[:, None]
    shape = (len(lengths) * width + 1, case.block_size, case.kv_heads)
    k_cache = torch.full((*shape, case.head_dim), float("nan"), dtype=case.dtype)
    v_cache = torch.full((*shape, case.v_head_dim or case.head_dim), float("nan"), dtype=case.dtype)
    block_table = torch.where(in_use, blocks.view(len(lengths), width), 0)
    pages = PagedSequences(k_cache, v_cache, block_table, torch.tensor(lengths, dtype=torch.int32))
    for row, length in enumerate(lengths):
        for cache in (k_cache, v_cache):
            slots = cache.flatten(0, 1)
            slots[pages.slots(row, 0, length)] = torch.randn(length, *slots.shape[1:]).to(case.dtype)
    return PagedSequences(*(tensor.to(device) for tensor in pages))


def make_queries(case: Case, tokens: int, device: str) -> Tensor:
    return torch.randn(tokens, case.heads, case.head_dim).to(case.dtype).to(device)


def offsets(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def expected(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """The reference's answer, always computed on the CPU."""
    return function(*(arg.cpu() if isinstance(arg, Tensor) else arg for arg in args))


def assert_agrees(actual: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[wanted.dtype]
    assert_close(actual.cpu(), wanted, atol=tolerance, rtol=tolerance)


class Launch(NamedTuple):
    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, int]


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: int) -> None:
        launches.append(Launch(self, args, options))

    monkeypatch.setattr(JITFunction, "run", run)
    return launches


def shared_memory_on_hopper(launch: Launch) -> int:
    """Bytes, of a recorded launch."""
    return compile_for_hopper(launch).metadata.shared


def compile_for_hopper(launch: Launch) -> CompiledKernel:
    """A recorded launch, compiled for a Hopper GPU, which need not be here."""
    signature, constants, hints = {}, {}, {}
    for i, (param, arg) in enumerate(zip(launch.kernel.params, launch.args, strict=True)):
        if param.is_constexpr or arg is None:
            signature[param.name], constants[i,] = "constexpr", arg
        else:
            signature[param.name] = mangle_type(arg)
            if isinstance(arg, Tensor) and not param.do_not_specialize:
                hints[i,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, hints)
    return triton_compile(source, target=HOPPER, options=launch.options)


def specialization_key(launch: Launch) -> tuple[str, str]:
    """What decides whether a launch compiles anew."""
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, make_backend(HOPPER))
    return launch.kernel.fn.__name__, str(bind(*launch.args, **launch.options)[1:])
