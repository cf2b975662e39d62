"""`tcdeploy::grouped_mm` computes what transformers' op computes, and takes its place in exported programs."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - registers transformers::grouped_mm_fallback
from torch import Tensor, nn

from tcdeploy.engine.check.precise_math import precise_math
from tcdeploy.kernels.linear.ops import grouped_mm
from tcdeploy.programs.passes.grouped_mm import foreign_ops, replace_grouped_mm

FALLBACK = torch.ops.transformers.grouped_mm_fallback


def make_inputs(
    sizes: list[int], rest: int = 0, dtype: torch.dtype = torch.float32, transposed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of these sizes, and `rest` rows after the last group. Experts are 24 to 40, or a view of 40 to 24."""
    torch.manual_seed(sum(sizes))
    x = torch.randn(sum(sizes) + rest, 24, dtype=dtype)
    shape = (len(sizes), 40, 24) if transposed else (len(sizes), 24, 40)
    w = torch.randn(shape, dtype=dtype)
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return x, w.transpose(1, 2) if transposed else w, offs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("sizes", "rest"),
    [([3, 5, 2], 0), ([0, 4, 0, 0, 1, 0], 0), ([7], 0), ([0, 0], 0), ([0, 0], 3), ([2, 1], 4), ([1] * 64, 0)],
)
def test_the_op_equals_that_of_transformers_bit_for_bit(
    sizes: list[int], rest: int, transposed: bool, dtype: torch.dtype
) -> None:
    inputs = make_inputs(sizes, rest, dtype, transposed)
    assert torch.equal(grouped_mm(*inputs), FALLBACK(*inputs))


def test_each_row_is_multiplied_by_the_matrix_of_its_group() -> None:
    x, w, offs = make_inputs([2, 0, 3], rest=1)
    expected = torch.cat([x[:2] @ w[0], x[2:5] @ w[2], torch.zeros(1, 40)])
    torch.testing.assert_close(grouped_mm(x, w, offs), expected)
    torch.testing.assert_close(grouped_mm(x, w, offs.to(torch.int64)), expected)


def test_the_op_is_well_formed() -> None:
    torch.library.opcheck(grouped_mm.overload, make_inputs([2, 0, 3]))
    torch.library.opcheck(grouped_mm.overload, make_inputs([0, 2], rest=2, transposed=True))


class Experts(nn.Module):
    def forward(self, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return FALLBACK(x, w, offs=offs) * 2


class Branches(nn.Module):
    """Its graph has a subgraph per branch."""

    def forward(self, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return torch.cond(offs[0] > 1, lambda: Experts()(x, w, offs), lambda: FALLBACK(x, w, offs))


@pytest.mark.parametrize("module", [Experts(), Branches()])
def test_exported_programs_call_the_op_of_this_package(module: nn.Module) -> None:
    """Also those for any number of rows."""
    x, w, offs = make_inputs([2, 0, 3])
    dynamic_shapes = ({0: torch.export.Dim.DYNAMIC}, None, None)
    exported = torch.export.export(module, (x, w, offs), dynamic_shapes=dynamic_shapes, strict=False)
    assert foreign_ops(exported) == {"transformers::grouped_mm_fallback"}
    replace_grouped_mm(exported)
    assert foreign_ops(exported) == set()
    code = "".join(part.code for part in exported.graph_module.modules() if hasattr(part, "code"))
    assert "tcdeploy.grouped_mm" in code and "transformers" not in code
    replaced = exported.module()
    for inputs in (make_inputs([2, 0, 3]), make_inputs([0, 6, 11]), make_inputs([1, 1, 1], rest=4)):
        assert torch.equal(replaced(*inputs), module(*inputs))


def test_ops_of_other_libraries_are_named() -> None:
    library = torch.library.Library("some_library", "DEF")
    library.define("scale.by_two(Tensor x) -> Tensor")
    library.impl("scale.by_two", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("some_library::scale.by_two", torch.empty_like, lib=library)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.some_library.scale.by_two(x[:, : x.shape[0] // 2]) + 1

    shapes = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(Model(), (torch.ones(8, 8),), dynamic_shapes=shapes, strict=False)
    assert foreign_ops(exported) == {"some_library::scale.by_two"}


def test_the_op_computes_in_float32_within_precise_math() -> None:
    """As transformers' op does in the reference of the parity check: activations are float32, and weights bfloat16."""
    x, w, offs = make_inputs([2, 0, 3], rest=1)
    weight = w.to(torch.bfloat16)
    with precise_math(torch.bfloat16, torch.float32):
        out = torch.ops.tcdeploy.grouped_mm(x, weight, offs)
    assert torch.equal(out, FALLBACK(x, weight.float(), offs))
