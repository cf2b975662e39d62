"""The ops that packages could not call are named, also those of branches."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - registers transformers::grouped_mm_fallback
from torch import Tensor, nn

from tcdeploy.programs.passes.foreign_ops import foreign_ops

FALLBACK = torch.ops.transformers.grouped_mm_fallback


class Experts(nn.Module):
    def forward(self, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return FALLBACK(x, w, offs=offs) * 2


class Branches(nn.Module):
    """Its graph has a subgraph per branch, and only they call the op."""

    def forward(self, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return torch.cond(offs[0] > 1, lambda: Experts()(x, w, offs), lambda: FALLBACK(x, w, offs))


@pytest.mark.parametrize("module", [Experts(), Branches()])
def test_an_op_of_transformers_is_named(module: nn.Module) -> None:
    inputs = (torch.ones(5, 24), torch.ones(3, 24, 40), torch.tensor([2, 2, 5], dtype=torch.int32))
    dynamic_shapes = ({0: torch.export.Dim.DYNAMIC}, None, None)
    exported = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    assert foreign_ops(exported) == {"transformers::grouped_mm_fallback"}


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
