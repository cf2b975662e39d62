"""Few-row products with quantised weights are fused with the operations around them, as dense products are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers the schemes
from tcdeploy.kernels.linear import scheme_matmul
from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.convert.quantise_model import quantise_model
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.planning.schemes import SCHEMES
from tcdeploy.programs.passes.post_grad import PostGradPass
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic
from tests.int8_rows import SCHEME, scheme_registered
from tests.programs.passes.compiled_targets import compile_and_run

FUSED, PLAIN = torch.ops.tcdeploy.fused_scheme_linear.default, torch.ops.tcdeploy.scheme_linear.default
WIDTH = 128
ALL_FLAGS = {"skinny_gemm": True, "fused_epilogues": True}


class Layer(nn.Module):
    """Attention's output projection and an MLP with packed gate and up, with residuals and norms, all quantised."""

    def __init__(self, scheme: str, bias: bool = False, mlp_width: int = 256) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv, self.o = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(LlamaRMSNorm(WIDTH) for _ in range(2))
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=mlp_width))
        self.bfloat16()
        quantise_model(self, lambda path: LayerScheme(scheme))
        pack_linears(self, (("mlp.gate_proj", "mlp.up_proj"),))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.qkv(self.norms[0](x)).sin())
        return x + self.mlp(self.norms[1](x))


@dataclasses.dataclass
class Products:
    """What the nodes of the op in a graph fuse, and how often the ops of a norm and of SwiGLU are left."""

    added: int
    gated: int
    normed: int
    count: int
    plain: int
    norms: int
    activations: int


class RecordingPass(PostGradPass):
    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        calls: list[Any] = [node.args for node in graph.find_nodes(op="call_function", target=FUSED)]
        ops: Counter[Any] = Counter(node.target for node in graph.nodes)
        self.products = Products(
            added=sum(addend is not None for _, _, addend, *_ in calls),
            gated=sum(gated for _, _, _, gated, *_ in calls),
            normed=sum(norm is not None for *_, norm, _, _ in calls),
            count=len(calls),
            plain=ops[PLAIN],
            norms=ops[torch.ops.aten.rsqrt.default],
            activations=ops[torch.ops.aten.exp.default],
        )


def compiled_products(layer: nn.Module, x: Tensor, codegen: bool = False, **flags: bool) -> Products:
    """Of the compiled layer, whose result must be that of eager mode."""
    graph_pass = RecordingPass(**flags)
    out = compile_and_run(layer, x, post_grad_pass=graph_pass, codegen=codegen)
    torch.testing.assert_close(out, layer(x), rtol=5e-2, atol=5e-2)
    return graph_pass.products


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(*shape, WIDTH).to(dtype)


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block", "int8", "int4_float16_zeros", "mxfp4", "nvfp4"])
def test_one_row_is_four_products_with_everything_fused(scheme: str) -> None:
    products = compiled_products(Layer(scheme), rows(1, 1), codegen=scheme == "fp8_block", **ALL_FLAGS)
    assert products == Products(added=2, gated=1, normed=2, count=4, plain=0, norms=0, activations=0)


@pytest.mark.parametrize(("scheme", "shape"), [("int8", (1, 5)), ("int8", (64, 1)), ("int4_bfloat16", (256, 1))])
def test_a_batch_keeps_its_norms(scheme: str, shape: tuple[int, ...]) -> None:
    products = compiled_products(Layer(scheme), rows(*shape), codegen=shape == (1, 5), **ALL_FLAGS)
    assert products == Products(added=2, gated=1, normed=0, count=4, plain=0, norms=2, activations=0)


@pytest.mark.parametrize(("wide_n", "normed"), [(512, 1), (513, 2)])
def test_wide_interleaved_weights_are_multiplied_by_a_row_that_another_kernel_has_normalised(
    wide_n: int, normed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up have 512 rows together."""
    monkeypatch.setattr(scheme_matmul, "WIDE_N", wide_n)
    layer = Layer("int4_bfloat16")
    assert layer.mlp.up_proj.scheme == "int4_bfloat16_interleaved"
    products = compiled_products(layer, rows(1, 1), **ALL_FLAGS)
    assert products == Products(added=2, gated=1, normed=normed, count=4, plain=0, norms=2 - normed, activations=0)


def test_permuted_layers_are_not_packed_but_fused() -> None:
    products = compiled_products(Layer("int4_float32_permuted"), rows(1, 1), **ALL_FLAGS)
    assert products == Products(added=2, gated=0, normed=3, count=5, plain=0, norms=0, activations=1)


def test_a_bias_is_added_and_leaves_no_place_for_a_residual() -> None:
    layer = Layer("fp8_channel", bias=True)
    assert compiled_products(layer, rows(1, 1), **ALL_FLAGS).added == 3

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = layer.qkv

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x)

    bias = layer.qkv.bias
    assert bias is not None and float(bias.abs().max()) > 0
    products = compiled_products(Residual(), rows(1, 1), **ALL_FLAGS)
    assert (products.added, products.count) == (1, 1)


def test_without_fused_epilogues_only_residuals_are_fused() -> None:
    products = compiled_products(Layer("int8"), rows(1, 1), skinny_gemm=True)
    assert products == Products(added=2, gated=0, normed=0, count=4, plain=0, norms=2, activations=1)


@pytest.mark.parametrize("flags", [{}, {"fused_epilogues": True}, {"inplace_residual": True}])
def test_without_skinny_gemm_nothing_is_fused(flags: dict[str, bool]) -> None:
    assert compiled_products(Layer("int8"), rows(1, 1), **flags).count == 0


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (lambda: Layer("int8"), rows(1, 129)),
        (lambda: Layer("int8").float(), rows(1, 1, dtype=torch.float32)),
    ],
    ids=["129 rows", "float32"],
)
def test_products_without_a_kernel_stay_calls_of_scheme_linear(layer: Any, x: Tensor) -> None:
    products = compiled_products(layer(), x, **ALL_FLAGS)
    assert (products.count, products.plain) == (0, 4)


def test_products_of_any_number_of_rows_stay_calls_of_scheme_linear() -> None:
    x = rows(1, 5)
    mark_dynamic(x, 1, min=2, max=256)
    products = compiled_products(Layer("int8"), x, **ALL_FLAGS)
    assert (products.count, products.plain) == (0, 4)


def test_halves_that_no_tile_divides_are_gated_outside_the_product() -> None:
    """Gate and up have 264 rows each, but the kernel takes multiples of 16."""
    products = compiled_products(Layer("int8", mlp_width=272 - 8), rows(1, 1), **ALL_FLAGS)
    assert products.gated == 0 and products.activations == 1


def test_a_scheme_without_kernels_is_not_fused() -> None:
    with scheme_registered():
        layer = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
        quantised = SchemeLinear(SCHEME, SCHEME.quantise(layer.weight.detach()), None)
        products = compiled_products(quantised, rows(1, 1), **ALL_FLAGS)
    assert (products.count, products.plain) == (0, 1)


def test_a_weight_that_the_program_gets_as_a_value_is_not_read_early() -> None:
    weight, scale = SCHEMES["fp8_channel"].quantise(torch.randn(WIDTH, WIDTH))
    graph_pass = RecordingPass(**ALL_FLAGS)

    def product(x: Tensor, scale: Tensor) -> Tensor:
        return torch.ops.tcdeploy.scheme_linear(x, [weight, scale], None, "fp8_channel")

    compile_and_run(product, rows(1), scale, post_grad_pass=graph_pass, codegen=False)
    assert (graph_pass.products.count, graph_pass.products.plain) == (0, 1)
