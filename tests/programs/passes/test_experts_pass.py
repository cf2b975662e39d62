"""SwiGLU, the weighted sum and the residual are fused into the products of few pairs; anything else is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from tcdeploy.kernels.experts.ops import expert_linear, group_pairs
from tcdeploy.programs.passes.post_grad import PostGradPass
from tests.kernels.experts.expert_cases import expert_tensors, expert_weight, scheme_of
from tests.programs.passes.compiled_targets import compile_and_run, count_targets

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 5, 128, 64, 2
EXPERT_LINEAR, GATED, SUMMED = (
    getattr(torch.ops.tcdeploy, name).default for name in ("expert_linear", "gated_expert_linear", "expert_linear_sum")
)
ADD = torch.ops.aten.add.Tensor
FLAGS = {"skinny_gemm": True, "fused_epilogues": True}
torch.manual_seed(3)
UP = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).bfloat16() / 11
DOWN = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).bfloat16() / 8
UP_BIAS, DOWN_BIAS = torch.randn(EXPERTS, 2 * INTERMEDIATE).bfloat16(), torch.randn(EXPERTS, HIDDEN).bfloat16()
ROUTER, NORM = torch.randn(16, 1024).bfloat16() / 8, torch.rand(1024).bfloat16() + 0.5
IDS = torch.tensor([[3, 1], [0, 3], [2, 4], [1, 0]])
FACTORS = torch.rand(4, TOP_K)


def unit_weights(case: str, experts: int, n: int, k: int) -> list[Tensor]:
    """Weights whose products with a row of standard normal values have about the same deviation."""
    tensors = expert_tensors(case, experts, n, k)
    deviation = expert_weight(tensors, 0, scheme_of(case), torch.float32).std()
    *first, scale = tensors[:2]
    return [*first, scale / (k**0.5 * deviation).to(scale.dtype), *tensors[2:]]


def rows(tokens: int) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(1, tokens, HIDDEN).bfloat16()


def swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return silu(gate) * up


def weighted_sum(y: Tensor, factors: Tensor) -> Tensor:
    return (y * factors.reshape(-1, 1)).view(*factors.shape, -1).sum(1).to(y.dtype)


def experts(
    x: Tensor, *, gate: Callable[[Tensor], Tensor] = swiglu, total: Callable[[Tensor, Tensor], Tensor] = weighted_sum,
    up: list[Tensor] | None = None, down: list[Tensor] | None = None, scheme: str = "", biased: bool = False,
    factor_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """A block of experts as transformers' modules trace it."""
    states = x.view(-1, HIDDEN)
    ids, factors = IDS[: len(states)], FACTORS[: len(states)].to(factor_dtype)
    groups = group_pairs(ids, EXPERTS)
    up_bias, down_bias = (UP_BIAS, DOWN_BIAS) if biased else (None, None)
    y = gate(expert_linear(states, ids, groups, up or [UP], up_bias, scheme))
    return total(expert_linear(y, ids, groups, down or [DOWN], down_bias, scheme), factors)


def block(x: Tensor, **options: object) -> Tensor:
    return x + experts(x, **options).view(x.shape)  # type: ignore[arg-type]


def counts_of(function: Callable[[Tensor], Tensor], tokens: int = 1, **flags: bool) -> tuple[int, int, int, int]:
    counts = count_targets(function, rows(tokens), codegen=False, **(flags or FLAGS))
    return counts[EXPERT_LINEAR], counts[GATED], counts[SUMMED], counts[ADD]


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_block_of_few_tokens_is_two_products(tokens: int, biased: bool, factor_dtype: torch.dtype) -> None:
    function = lambda x: block(x, biased=biased, factor_dtype=factor_dtype)  # noqa: E731
    assert counts_of(function, tokens) == (0, 1, 1, 0)
    assert counts_of(function, tokens, skinny_gemm=True) == (2, 0, 0, 2), (
        "fused_epilogues is off; one addition is silu's"
    )


def test_the_fused_block_compiles() -> None:
    counts = count_targets(block, rows(1), **FLAGS)
    assert counts[GATED] == counts[SUMMED] == 1 and counts[torch.ops.tcdeploy.group_pairs.default] == 0


def normed_block(x: Tensor, up: list[Tensor], scheme: str) -> Tensor:
    """With a router that is large enough for the GEMV."""
    normed = NORM * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-3)).to(x.dtype)
    states = normed.view(-1, 1024)
    values, ids = torch.topk(torch.nn.functional.linear(states, ROUTER).float().softmax(-1), TOP_K)
    groups = group_pairs(ids, len(ROUTER))
    y = swiglu(expert_linear(states, ids, groups, up, None, scheme))
    return weighted_sum(
        expert_linear(y, ids, groups, [DOWN.repeat(4, 1, 1)[: len(ROUTER)]], None, ""), values.bfloat16()
    )


@pytest.mark.parametrize(
    ("case", "tokens", "is_fused"), [("dense", 1, True), ("dense", 2, False), ("fp8_channel", 1, False)]
)
def test_the_norm_of_one_token_is_fused_into_router_and_dense_experts(case: str, tokens: int, is_fused: bool) -> None:
    torch.manual_seed(2)
    up = unit_weights(case, len(ROUTER), 2 * INTERMEDIATE, 1024)
    x = torch.randn(1, tokens, 1024).bfloat16() / 30
    function = lambda x: normed_block(x, up, scheme_of(case))  # noqa: E731
    counts = count_targets(function, x, codegen=is_fused, **FLAGS)
    assert counts[GATED] == 1 and counts[torch.ops.tcdeploy.rms_norm_linear.default] == is_fused
    assert counts[torch.ops.aten.rsqrt.default] == (not is_fused)


class PrefetchingPass(PostGradPass):
    """Keeps what `top_k` prefetches, and the first tensor of the gated product."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        self.prefetched = [node.args[4:] for node in graph.nodes if node.target is torch.ops.tcdeploy.top_k.default]
        self.multiplied = [node.args[2][0] for node in graph.nodes if node.target is GATED]  # type: ignore[index]


@pytest.mark.parametrize("case", ["dense", "fp8_channel"])
def test_the_weights_of_gated_experts_are_prefetched(case: str) -> None:
    torch.manual_seed(2)
    up = unit_weights(case, len(ROUTER), 2 * INTERMEDIATE, 1024)
    x, function = torch.randn(1, 1, 1024).bfloat16() / 30, lambda x: normed_block(x, up, scheme_of(case))
    fused, plain = PrefetchingPass(**FLAGS), PrefetchingPass(skinny_gemm=True)
    for graph_pass in (fused, plain):
        out = compile_and_run(function, x, post_grad_pass=graph_pass)
        torch.testing.assert_close(out, function(x), rtol=5e-2, atol=0.2)
    assert fused.prefetched == [tuple(fused.multiplied)] and len(fused.multiplied) == 1
    assert plain.prefetched == [()]


@pytest.mark.parametrize(("case", "is_fused"), [("fp8_channel", True), ("int4", True), ("int4 permuted", False)])
def test_quantised_experts_are_two_products_unless_columns_are_permuted(case: str, is_fused: bool) -> None:
    torch.manual_seed(1)
    up = unit_weights(case, EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    down = unit_weights(case, EXPERTS, HIDDEN, INTERMEDIATE)
    function = lambda x: block(x, up=up, down=down, scheme=scheme_of(case))  # noqa: E731
    assert counts_of(function) == ((0, 1, 1, 0) if is_fused else (2, 0, 0, 2))


def test_more_pairs_are_not_fused() -> None:
    ids, factors = IDS.repeat(3, 1)[:9], FACTORS.repeat(3, 1)[:9].bfloat16()

    def many(x: Tensor) -> Tensor:
        groups = group_pairs(ids, EXPERTS)
        y = swiglu(expert_linear(x.view(-1, HIDDEN), ids, groups, [UP], None, ""))
        return weighted_sum(expert_linear(y, ids, groups, [DOWN], None, ""), factors)

    assert counts_of(many, 9) == (2, 0, 0, 1)


def other_gate(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return gelu(gate) * up


def scaled(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return silu(gate) * 2 + up


def swapped_halves(y: Tensor) -> Tensor:
    up, gate = y.chunk(2, dim=-1)
    return silu(gate) * up


def alternating(y: Tensor) -> Tensor:
    return silu(y[:, ::2]) * y[:, 1::2]


def halves_read_again(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return silu(gate) * up + gate


def product_read_again(y: Tensor) -> Tensor:
    return swiglu(y) + y[:, :INTERMEDIATE]


@pytest.mark.parametrize(
    "gate", [other_gate, scaled, swapped_halves, alternating, halves_read_again, product_read_again]
)
def test_other_gates_are_not_fused(gate: Callable[[Tensor], Tensor]) -> None:
    assert counts_of(lambda x: block(x, gate=gate))[:3] == (1, 0, 1)


def sum_over_features(y: Tensor, factors: Tensor) -> Tensor:
    weighted = (y * factors.reshape(-1, 1)).view(*factors.shape, -1)
    return weighted.transpose(1, 2).reshape(len(factors), -1)[:, :HIDDEN] + weighted.sum(2)[:, :1]


def unweighted(y: Tensor, factors: Tensor) -> Tensor:
    return y.view(*factors.shape, -1).sum(1)


def kept_in_float32(y: Tensor, factors: Tensor) -> Tensor:
    return (y * factors.float().reshape(-1, 1)).view(*factors.shape, -1).sum(1)


def pairs_read_again(y: Tensor, factors: Tensor) -> Tensor:
    return weighted_sum(y, factors) + y[: len(factors)]


def weighted_by_feature(y: Tensor, factors: Tensor) -> Tensor:
    return (y * y.new_ones(HIDDEN)).view(*factors.shape, -1).sum(1) * factors[:, :1]


@pytest.mark.parametrize(
    "total", [sum_over_features, unweighted, kept_in_float32, pairs_read_again, weighted_by_feature]
)
def test_other_sums_are_not_fused(total: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert counts_of(lambda x: block(x, total=total))[:3] == (1, 1, 0)


def test_the_sum_is_not_fused_if_its_input_does_not_depend_on_the_ids() -> None:
    """Its kernel reads ids before the previous kernel has ended, which may be the one that writes them."""

    def of_inputs(x: Tensor) -> Tensor:
        ids = IDS[:1] + 0
        y = x.view(-1, HIDDEN)[:, :INTERMEDIATE].repeat(TOP_K, 1)
        groups = group_pairs(ids, EXPERTS)
        return weighted_sum(expert_linear(y, ids, groups, [DOWN], None, ""), FACTORS[:1].bfloat16())

    assert counts_of(of_inputs)[:3] == (1, 0, 0)


@pytest.mark.parametrize(("tokens", "summed"), [(1, 1), (4, 0)])
def test_the_sum_is_not_fused_if_its_ids_are_not_contiguous(tokens: int, summed: int) -> None:
    """A kernel would copy them right before the sum's, which reads ids before that kernel has ended."""

    def of_the_best(x: Tensor) -> Tensor:
        states = x.view(-1, HIDDEN)
        ids = torch.topk(torch.nn.functional.linear(states, ROUTER[:EXPERTS, :HIDDEN]), TOP_K + 1).indices[:, :TOP_K]
        groups = group_pairs(ids, EXPERTS)
        y = swiglu(expert_linear(states, ids, groups, [UP], None, ""))
        return weighted_sum(expert_linear(y, ids, groups, [DOWN], None, ""), FACTORS[:tokens].bfloat16())

    assert counts_of(of_the_best, tokens)[1:3] == (1, summed)
