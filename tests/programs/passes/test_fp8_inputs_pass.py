"""Programs with many rows quantise the inputs of FP8 weights as nodes, and compute what eager mode computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.convert.quantise_model import quantise_model
from tcdeploy.models.convert.scheme_linear import SchemeLinear, quantise_inputs
from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.programs.passes import fp8_inputs
from tcdeploy.programs.passes.nodes import insert_call
from tcdeploy.programs.passes.post_grad import PostGradPass
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic
from tests.kernels.linear.matmul_cases import relative_error
from tests.programs.passes.compiled_targets import compile_and_run

aten, ops = torch.ops.aten, torch.ops.tcdeploy
WIDTH, MIN_ROWS = 512, 17
ALL_FLAGS = {"skinny_gemm": True, "inplace_residual": True, "fused_epilogues": True}
ERROR_LIMIT = 2e-3  # of float32: a rounding error may lead to the next code, 1/16 farther
each_scheme = pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block"])


class Layer(nn.Module):
    """An op that mixes tokens, then the per-token ops of a decoder layer, all of whose linear layers are quantised."""

    def __init__(self, scheme: str, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(LlamaRMSNorm(WIDTH) for _ in range(2))
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=WIDTH))
        if bias:
            nn.init.normal_(self.q.bias)
        quantise_model(self, lambda path: LayerScheme(scheme))
        pack_linears(self, (("mlp.gate_proj", "mlp.up_proj"),))
        quantise_inputs([self], MIN_ROWS)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.o((self.q(normed) * self.k(normed)).softmax(dim=1) * 100)
        return x + self.mlp(self.norms[1](x))


class RecordingPass(PostGradPass):
    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        self.counts: Counter[Any] = Counter(node.target for node in graph.nodes)
        products = graph.find_nodes(op="call_function", target=ops.fp8_product.default)
        self.tokens = [str(node.args[0].meta["val"].shape[-2]) for node in products]


def rows(count: int) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(1, count, WIDTH) * torch.exp2(torch.rand(1, count, 1) * 6)


@each_scheme
def test_products_of_many_rows_become_products_of_codes(scheme: str) -> None:
    layer, x, graph_pass = Layer(scheme), rows(MIN_ROWS), RecordingPass(**ALL_FLAGS)
    out = compile_and_run(layer, x, post_grad_pass=graph_pass)
    assert relative_error(out, layer(x)) < ERROR_LIMIT
    assert graph_pass.counts[ops.fp8_product.default] == 5 and graph_pass.counts[ops.scheme_linear.default] == 0
    assert graph_pass.counts[ops.fused_scheme_linear.default] == 0
    num_maxima = graph_pass.counts[aten.amax.default] - 1  # of the softmax
    assert num_maxima == 4, "q and k share codes, and so do gate and up"


@each_scheme
def test_products_of_few_rows_keep_their_inputs(scheme: str) -> None:
    layer, x, graph_pass = Layer(scheme), rows(MIN_ROWS - 1), RecordingPass(**ALL_FLAGS)
    out = compile_and_run(layer, x, post_grad_pass=graph_pass, codegen=False)
    assert relative_error(out, layer(x)) < 1e-5
    assert graph_pass.counts[ops.fp8_product.default] == 0


@each_scheme
def test_a_program_for_a_range_of_lengths_quantises_at_every_length(scheme: str) -> None:
    layer, x, graph_pass = Layer(scheme), rows(5), RecordingPass(**ALL_FLAGS)
    quantise_inputs([layer], 1)
    expected = layer(x)
    quantise_inputs([layer], MIN_ROWS)
    assert relative_error(layer(x), expected) > 5 * ERROR_LIMIT, "rounding to FP8 can be seen"
    mark_dynamic(x, 1, min=2, max=256)
    out = compile_and_run(layer, x, post_grad_pass=graph_pass, codegen=scheme == "fp8_block")
    assert relative_error(out, expected) < ERROR_LIMIT
    assert graph_pass.counts[ops.fp8_product.default] == 5


@each_scheme
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_last_layer_quantises_the_selected_rows_only(scheme: str, is_dynamic: bool) -> None:
    layer, x, selected, graph_pass = Layer(scheme), rows(64), torch.tensor([3, 0, 63]), RecordingPass(**ALL_FLAGS)
    expected = layer(x)[:, selected]
    if is_dynamic:
        mark_dynamic(x, 1, min=2, max=256)
    out = compile_and_run(
        lambda x, rows: layer(x)[:, rows], x, selected, post_grad_pass=graph_pass, codegen=False, rows=selected
    )
    assert relative_error(out, expected) < ERROR_LIMIT
    *before, o, gate_and_up, down = graph_pass.tokens
    assert [o, gate_and_up, down] == ["3"] * 3 and len(before) == 2 and "3" not in before


@each_scheme
def test_a_bias_is_added_once(scheme: str) -> None:
    layer, x, graph_pass = Layer(scheme, bias=True), rows(32), RecordingPass(**ALL_FLAGS)
    out = compile_and_run(layer, x, post_grad_pass=graph_pass, codegen=False)
    assert relative_error(out, layer(x)) < ERROR_LIMIT


@each_scheme
def test_a_batch_of_decode_rows_is_quantised(scheme: str) -> None:
    layer, x, graph_pass = Layer(scheme).bfloat16(), rows(32).view(32, 1, -1).bfloat16(), RecordingPass(**ALL_FLAGS)
    out = compile_and_run(layer, x, post_grad_pass=graph_pass, codegen=False)
    assert graph_pass.counts[ops.fp8_product.default] == 5 and out.dtype == torch.bfloat16
    assert relative_error(out, layer(x)) < 5e-2


def test_layers_whose_shape_cublas_refuses_keep_their_inputs() -> None:
    layer = nn.ModuleList([nn.Linear(WIDTH, 40), nn.Linear(72, 64)])
    quantise_model(layer, lambda path: LayerScheme("fp8_channel"))
    quantise_inputs([layer], MIN_ROWS)
    assert [item.fp8_min_rows for item in layer if isinstance(item, SchemeLinear)] == [0, 0]


def without_scales_of_inputs(graph: Graph, product: Any) -> None:
    [scaled] = product.users
    scaled.replace_all_uses_with(product)


def without_scales_of_the_weight(graph: Graph, product: Any) -> None:
    [scaled] = product.users
    [twice_scaled] = scaled.users
    twice_scaled.replace_all_uses_with(scaled)


def with_codes_of_the_next_row(graph: Graph, product: Any) -> None:
    with graph.inserting_before(product):
        as_bytes = insert_call(graph, aten.view.dtype, product.args[0], torch.uint8)
        rolled = insert_call(graph, aten.roll.default, as_bytes, [1], [1])
        product.update_arg(0, insert_call(graph, aten.view.dtype, rolled, torch.float8_e4m3fn))


@pytest.mark.parametrize("fault", [without_scales_of_inputs, without_scales_of_the_weight, with_codes_of_the_next_row])
def test_a_mistake_exceeds_the_limit(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.ModuleList([nn.Linear(WIDTH, 64)]).requires_grad_(False), rows(32)
    quantise_model(layer, lambda path: LayerScheme("fp8_channel"))
    quantise_inputs([layer], MIN_ROWS)
    right = fp8_inputs.quantise_inputs

    class FaultyPass(PostGradPass):
        def __call__(self, graph: Graph) -> None:
            right(graph)
            [product] = graph.find_nodes(op="call_function", target=ops.fp8_product.default)
            fault(graph, product)

    out = compile_and_run(lambda x: layer[0](x), x, post_grad_pass=FaultyPass(), codegen=False)
    assert relative_error(out, layer[0](x)) > 0.1
