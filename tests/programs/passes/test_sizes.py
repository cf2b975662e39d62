"""Sizes that an exported graph reads from intermediate tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export import Dim

from tcdeploy.programs.passes.sizes import SYM_SIZE, read_sizes_from_inputs


class Model(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        doubled = x * 2
        joined = torch.cat([doubled, y])
        return doubled.reshape(1, doubled.shape[0], -1), joined.reshape(joined.shape[0], 2, -1)


def exported_module() -> Any:
    shapes = ({0: Dim.DYNAMIC(min=2)}, {0: Dim.DYNAMIC(min=2)})
    return torch.export.export(Model(), (torch.ones(5, 4), torch.ones(7, 4)), dynamic_shapes=shapes).graph_module


def with_sizes_of_intermediates(module: Any) -> Any:
    """torch.export may read the sizes from the inputs; Inductor's graphs read them from any tensor."""
    for node in module.graph.find_nodes(op="call_function", target=SYM_SIZE):
        for other in module.graph.nodes:
            value = other.meta.get("val")
            is_later = other.op == "call_function" and isinstance(value, torch.Tensor)
            if is_later and str(value.shape[0]) == str(node.meta["val"]):
                with module.graph.inserting_after(other):
                    size = module.graph.call_function(SYM_SIZE, (other, 0))
                size.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(size, delete_user_cb=lambda user, after=other: user > after)
                break
    return module


def test_sizes_are_read_from_inputs() -> None:
    module = with_sizes_of_intermediates(exported_module())
    before = {node.args[0].op for node in module.graph.find_nodes(op="call_function", target=SYM_SIZE)}
    x, y = torch.randn(3, 4), torch.randn(6, 4)
    expected = Model()(x, y)
    read_sizes_from_inputs(module.graph)
    module.graph.lint()
    module.recompile()
    sources = [node.args[0] for node in module.graph.find_nodes(op="call_function", target=SYM_SIZE)]
    assert "call_function" in before and {source.op for source in sources if str(source) != "cat"} == {"placeholder"}
    for actual, wanted in zip(module(x, y), expected, strict=True):
        assert torch.equal(actual, wanted)
