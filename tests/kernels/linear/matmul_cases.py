"""Matrix products and their expected results, shared by the tests of the linear kernels.

`poisoned_outputs` fills each output with NaN and places it in a larger block of NaN, so that a missing column or an
additional row fails the test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from triton.runtime import interpreter

# One rounding of the output (8 and 11 bits), and sums in another order.
TOLERANCE = {torch.bfloat16: 4.1e-3, torch.float16: 6e-4}
GUARD_ROWS = 64
SHAPES = {  # n, k of qkv, o, gate and up, down, head
    "llama 8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "qwen 7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584)),
    "llama 1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
}
REAL_SHAPES = sorted({shape for shapes in SHAPES.values() for shape in shapes})
EPS = 0.25  # large enough to affect the result


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The NaN blocks whose first rows are the outputs, in the order of allocation."""
    blocks: list[Tensor] = []
    original = Tensor.new_empty

    def new_empty(self: Tensor, *shape: int, **options: Any) -> Tensor:
        if options:  # a call of the interpreter
            return original(self, *shape, **options)
        rows, columns = shape
        blocks.append(torch.full((rows + GUARD_ROWS, columns), float("nan"), dtype=self.dtype, device=self.device))
        return blocks[-1][:rows]

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    return blocks


@contextmanager
def assert_reads_only(monkeypatch: pytest.MonkeyPatch, *tensors: Tensor) -> Iterator[list[int]]:
    """Fail on an interpreter load outside the tensors. Yields the element count of each load."""
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
        gate, up = y.chunk(2, dim=1)
        y = gate * gate.sigmoid() * up
    return (y if addend is None else y + addend.double()).to(x.dtype)


def expected_gated(x: Tensor, w: Tensor) -> Tensor:
    return expected(x, w, gated=True)


def assert_agrees(actual: Tensor, expected: Tensor) -> None:
    """Within one rounding of each element, with an absolute tolerance for sums that nearly cancel."""
    tolerance = TOLERANCE[expected.dtype]
    assert not actual.isnan().any()
    assert_close(actual, expected, rtol=2 * tolerance, atol=tolerance * float(expected.float().std()))


def assert_replays_repeat(chain: Callable[[], Tensor], x: Tensor) -> None:
    """4,000 replays of a graph of `chain`, over four values of x in turn, equal the eager results bit by bit."""
    batches = [torch.randn_like(x) for _ in range(4)]

    def run_eagerly(batch: Tensor) -> Tensor:
        x.copy_(batch)
        torch.cuda.synchronize()
        return chain()

    eager = [run_eagerly(batch).clone() for batch in batches]
    assert not torch.equal(eager[0], eager[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    mismatches = torch.zeros((), dtype=torch.int64, device=x.device)
    for replay in range(4000):
        x.copy_(batches[replay % 4])
        graph.replay()
        mismatches += (out != eager[replay % 4]).sum()
    assert int(mismatches) == 0


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def pointers_used_before_wait(ttir: str) -> set[str]:
    """The kernel's pointer arguments from which the addresses of loads and stores before the wait are computed."""
    definitions = dict(re.findall(r"(%\w+) = (.*)", ttir))

    def arguments_of(name: str) -> set[str]:
        if name not in definitions:  # an argument
            return {name[1:]}
        return set().union(*(arguments_of(operand) for operand in re.findall(r"%\w+", definitions[name])))

    before = ttir.split("griddepcontrol.wait")[0]
    addresses = re.findall(r"tt\.(?:load|store|atomic\w*) (%\w+)", before)
    assert addresses
    names = set().union(*(arguments_of(address) for address in addresses))
    return {name for name in names if re.search(rf"%{name}: !tt.ptr", ttir)}
