"""Quantised layers in the passes: packed ones are one call, which computes only the selected rows of a last layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.convert.quantise_model import quantise_model
from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.programs.passes.nodes import is_weight
from tcdeploy.programs.passes.post_grad import PostGradPass
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic
from tests.int8_rows import SCHEME, scheme_registered
from tests.programs.passes.compiled_targets import compile_and_run

OP = torch.ops.tcdeploy.scheme_linear.default
ROWS = [3, 0, 63]
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def scheme() -> Iterator[None]:
    with scheme_registered():
        yield


class Layer(nn.Module):
    """An op that mixes tokens, then the per-token ops of a decoder layer, all of whose linear layers are quantised."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mixed, self.o = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.norm = LlamaRMSNorm(width)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=width, intermediate_size=2 * width, mlp_bias=True))
        quantise_model(self, lambda path: LayerScheme(SCHEME.name))
        pack_linears(self, (("mlp.gate_proj", "mlp.up_proj"),))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.mixed(x).softmax(dim=1))
        return x + self.mlp(self.norm(x))


class RecordingPass(PostGradPass):
    """Records the tokens of each call of the op, and checks that its tensors have the role of weights."""

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        calls = graph.find_nodes(op="call_function", target=OP)
        self.tokens = [str(call.args[0].meta["val"].shape[1]) for call in calls]
        assert all(is_weight(tensor) for call in calls for tensor in call.args[1])
        assert not any(node.target in (aten.mm.default, aten.addmm.default) for node in graph.nodes)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_last_layer_calls_the_op_for_the_selected_rows(is_dynamic: bool, is_fused: bool) -> None:
    layer, x, rows = Layer(128), torch.randn(1, 64, 128), torch.tensor(ROWS)
    expected = layer(x)[:, rows]
    if is_dynamic:
        mark_dynamic(x, 1, min=2, max=256)
    graph_pass = RecordingPass(skinny_gemm=is_fused, inplace_residual=is_fused, fused_epilogues=is_fused)
    out = compile_and_run(
        lambda x, rows: layer(x)[:, rows],
        x,
        rows,
        post_grad_pass=graph_pass,
        codegen=is_fused and is_dynamic,
        rows=rows,
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    mixed, *others = graph_pass.tokens
    assert others == ["3", "3", "3"] and (mixed != "3" if is_dynamic else mixed == "64")


def test_a_selection_of_features_is_not_one_of_tokens() -> None:
    """Input and output are both [1, 64], so only the dimension shows that features are selected."""
    layer, x, rows = nn.ModuleList([nn.Linear(64, 64)]).requires_grad_(False), torch.randn(1, 64), torch.tensor(ROWS)
    quantise_model(layer, lambda path: LayerScheme(SCHEME.name))
    graph_pass = RecordingPass()
    out = compile_and_run(
        lambda x, rows: layer[0](x)[:, rows], x, rows, post_grad_pass=graph_pass, codegen=False, rows=rows
    )
    assert graph_pass.tokens == ["64"]
    torch.testing.assert_close(out, layer[0](x)[:, rows], rtol=1e-4, atol=1e-4)


def test_products_of_one_row_stay_calls_of_the_op() -> None:
    """No pass for one-row products takes them for its own, also with the shapes and dtype that it looks for."""
    layer, x = Layer().bfloat16(), torch.randn(1, 1, 1024).bfloat16()
    graph_pass = RecordingPass(skinny_gemm=True, inplace_residual=True, fused_epilogues=True)
    out = compile_and_run(layer, x, post_grad_pass=graph_pass, codegen=False)
    assert graph_pass.tokens == ["1"] * 4
    torch.testing.assert_close(out, layer(x), rtol=5e-2, atol=5e-2)
