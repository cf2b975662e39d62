"""Compiles the Triton kernels that the ops of a package launch, while Inductor generates the package's code.

Inductor decides the strides of an op's inputs when it generates the code of its call (`FallbackKernel.codegen`). There
the op's Python function is called on fake tensors with these strides, once for each shape that will be captured.

The kernels that Inductor itself generates are compiled by the block of Python that it runs to fill its table of cubins
(`generate_and_run_autotune_block`). That block runs on fake tensors too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.virtualized import V

from tcdeploy.torch_compat.blind.fake_cuda import FakeCuda


@dataclass
class CapturedShapes:
    """The shapes of the bucket that is being compiled, in tokens. `size`: its own. `sizes`: those of a dynamic bucket.

    `rows`: numbers of decode rows. Ops read them from the element `rows_index` of their only CPU tensor.
    """

    rows_index: int
    size: int = 0
    sizes: tuple[int, ...] = ()
    rows: tuple[int, ...] = (0,)


def launch_while_compiling(
    fake_cuda: FakeCuda, namespace: str, functions: dict[str, Callable[..., Any]], shapes: CapturedShapes,
    recording: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:  # fmt: skip
    """From now on in this process, compile the kernels of packages. `recording`: entered around each op's launches."""
    run_block, codegen = PythonWrapperCodegen.generate_and_run_autotune_block, ir.FallbackKernel.codegen

    def run_on_fake_tensors(self: Any) -> Any:
        with fake_cuda.tensors():
            return run_block(self)

    def launch_and_codegen(self: Any, wrapper: Any) -> Any:
        if getattr(self.op_overload, "namespace", "") == namespace:
            function = functions[self.op_overload._schema.name.split("::")[1]]
            with torch.no_grad(), fake_cuda.tensors(runs_ops=True), recording():
                _launch_all(self, function, shapes)
        return codegen(self, wrapper)

    PythonWrapperCodegen.generate_and_run_autotune_block = run_on_fake_tensors  # type: ignore[method-assign]
    ir.FallbackKernel.codegen = launch_and_codegen  # type: ignore[method-assign]


def _launch_all(node: Any, function: Callable[..., Any], shapes: CapturedShapes) -> None:
    numbers = (sympy.sympify(size) for item in node.inputs for size in (*item.get_size(), *item.get_stride()))
    symbols = {symbol for number in numbers for symbol in number.free_symbols}
    token_symbols = [symbol for symbol in symbols if V.graph.sizevars.optimization_hint(symbol) == shapes.size]
    for tokens in shapes.sizes if token_symbols and shapes.sizes else (shapes.size,):
        for rows in shapes.rows:
            _launch(node, function, dict.fromkeys(token_symbols, tokens), shapes.rows_index, rows)


def _launch(node: Any, function: Callable[..., Any], values: dict[Any, int], rows_index: int, rows: int) -> None:
    def number(value: Any) -> int:
        return int(V.graph.sizevars.optimization_hint(sympy.sympify(value).subs(values)))

    def example(item: Any) -> Any:
        if isinstance(item, list | tuple):
            return type(item)(map(example, item))
        if not isinstance(item, ir.IRNode) or isinstance(item, ir.NonTensorObj):
            return item
        layout = item.get_layout()
        size, stride, offset = list(map(number, layout.size)), list(map(number, layout.stride)), number(layout.offset)
        extent = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1
        base = torch.zeros(extent, dtype=item.get_dtype(), device=item.get_device())
        if base.device.type == "cpu":
            base[rows_index] = rows
        return base.as_strided(size, stride, offset)

    args, kwargs = node.unflatten_args(node.inputs, node.constant_args)
    named = {**node.kwargs, **kwargs}
    function(*map(example, args), **{name: example(item) for name, item in named.items()})
