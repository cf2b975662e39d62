"""Products and what is expected of them: what the tests of both linear kernels share.

The output is poisoned with NaN and lies in a larger block of NaN, so that a column left out or a row too many shows in
every test that takes `poisoned_outputs`. `compile_for_hopper` needs no GPU: Triton's compiler has none either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

HOPPER = GPUTarget("cuda", 90, 32)
HOPPER_SHARED_BYTES = 227 * 1024
# One rounding of the output (8 and 11 bits), and sums in another order.
TOLERANCE = {torch.bfloat16: 4.1e-3, torch.float16: 6e-4}
GUARD_ROWS = 64
SHAPES = {  # n, k of qkv, o, gate and up, down, head
    "llama 8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "qwen 7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584)),
    "llama 1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
}
REAL_SHAPES = sorted({shape for shapes in SHAPES.values() for shape in shapes})
EPS = 0.25  # large enough to count


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The blocks of NaN that outputs are the first rows of, in the order they were asked for."""
    made: list[Tensor] = []
    plain = Tensor.new_empty

    def new_empty(self: Tensor, *shape: int, **options: Any) -> Tensor:
        if options:  # the interpreter's own
            return plain(self, *shape, **options)
        rows, columns = shape
        made.append(torch.full((rows + GUARD_ROWS, columns), float("nan"), dtype=self.dtype, device=self.device))
        return made[-1][:rows]

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    return made


@contextmanager
def assert_reads_only(monkeypatch: pytest.MonkeyPatch, *tensors: Tensor) -> Iterator[list[int]]:
    """Every load of the interpreter must lie in one of the tensors; gives how many elements each load asked for."""
    spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    load = interpreter.InterpreterBuilder.create_masked_load
    loads: list[int] = []

    def checked(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        addresses = pointers.data[mask.data]
        loads.append(len(addresses))
        assert sum(((addresses >= start) & (addresses < end)).sum() for start, end in spans) == len(addresses)
        return load(self, pointers, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_load", checked)
        yield loads


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    return torch.randn(*shape).to(device, dtype)


def expected(
    x: Tensor, w: Tensor, addend: Tensor | None = None, gated: bool = False, norm: Tensor | None = None
) -> Tensor:
    """The product in float64, rounded once."""
    row = x.double()
    if norm is not None:
        row = row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + EPS) * norm.double()
    y = row @ w.double().T
    if gated:
        gate, passed = y.chunk(2, dim=1)
        y = gate * gate.sigmoid() * passed
    return (y if addend is None else y + addend.double()).to(x.dtype)


def expected_gated(x: Tensor, w: Tensor) -> Tensor:
    return expected(x, w, gated=True)


def assert_agrees(actual: Tensor, wanted: Tensor) -> None:
    """Within one rounding of the numbers' own size, with room for sums that nearly cancel."""
    tolerance = TOLERANCE[wanted.dtype]
    assert not actual.isnan().any()
    assert_close(actual, wanted, rtol=2 * tolerance, atol=tolerance * float(wanted.float().std()))


def assert_replays_repeat(chain: Callable[[], Tensor], x: Tensor) -> None:
    """4,000 replays of a graph of `chain`, on four values of its x in turn, give the bits of the first launches."""
    batches = [torch.randn_like(x) for _ in range(4)]

    def answer(batch: Tensor) -> Tensor:
        x.copy_(batch)
        torch.cuda.synchronize()
        return chain()

    wanted = [answer(batch).clone() for batch in batches]
    assert not torch.equal(wanted[0], wanted[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    wrong = torch.zeros((), dtype=torch.int64, device=x.device)
    for replay in range(4000):
        x.copy_(batches[replay % 4])
        graph.replay()
        wrong += (out != wanted[replay % 4]).sum()
    assert int(wrong) == 0


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


def compile_for_hopper(launched: Any) -> Any:
    """The compiled kernel of a recorded launch."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    hints: dict[tuple[int], Any] = {}
    for i, (param, arg) in enumerate(zip(launched.kernel.params, launched.args, strict=True)):
        if param.is_constexpr or arg is None:
            signature[param.name], constants[i,] = "constexpr", arg
        else:
            signature[param.name] = mangle_type(arg)
            if param.name not in ("rows", "eps"):
                hints[i,] = [["tt.divisibility", 16]]
    options = {name: value for name, value in launched.options.items() if name != "grid"}
    return triton_compile(ASTSource(launched.kernel, signature, constants, hints), target=HOPPER, options=options)
