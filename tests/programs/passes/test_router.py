"""Routers of transformers choose their experts by one op; results that other nodes read stay in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.programs.passes.compiled_targets import CountingPass, compile_and_run

HIDDEN, EXPERTS, K = 64, 16, 4
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": K}
EXP, AMAX, DIV, TOPK = (
    torch.ops.aten.exp.default, torch.ops.aten.amax.default, torch.ops.aten.div.Tensor, torch.ops.aten.topk.default
)  # fmt: skip
OUR_TOP_K = torch.ops.tcdeploy.top_k.default
CAST = torch.ops.prims.convert_element_type.default


class Compiled(CountingPass):
    """Also keeps the arguments of our ops."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        self.softmaxes = [node.args[2] for node in graph.nodes if node.target is OUR_TOP_K]


def run(function: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, codegen: bool = False) -> Compiled:
    """Compile `function`, which returns weights and ids, and compare it with eager mode."""

    def both(x: Tensor) -> Tensor:
        weights, ids = function(x)
        return torch.cat([weights.float(), ids.float()], -1)

    graph_pass = Compiled()
    actual = compile_and_run(both, x, post_grad_pass=graph_pass, codegen=codegen)
    with torch.no_grad():
        torch.testing.assert_close(actual, both(x), rtol=2**-7, atol=0)
    return graph_pass


def router(module: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(5)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module.to(dtype)


def states(tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(6)
    return torch.randn(tokens, HIDDEN, dtype=dtype)


def distinct_scores(tokens: int) -> Tensor:
    """bfloat16 and the softmax keep them apart, so that the order is that of torch."""
    generator = torch.Generator().manual_seed(6)
    return torch.stack([torch.randperm(HIDDEN, generator=generator) for _ in range(tokens)]).bfloat16() / 8


QWEN3, QWEN2, OLMOE = (
    lambda normalises, config=config, module=module: module(
        config(**SIZES, num_experts=EXPERTS, norm_topk_prob=normalises)
    )
    for config, module in (
        (Qwen3MoeConfig, Qwen3MoeTopKRouter), (Qwen2MoeConfig, Qwen2MoeTopKRouter), (OlmoeConfig, OlmoeTopKRouter),
    )
)  # fmt: skip
ROUTERS: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "qwen3_moe normalised": (lambda: QWEN3(True), "selected"),
    "qwen3_moe": (lambda: QWEN3(False), "all"),
    "qwen2_moe": (lambda: QWEN2(False), "all"),
    "olmoe normalised": (lambda: OLMOE(True), "selected"),
    "mixtral": (lambda: MixtralTopKRouter(MixtralConfig(**SIZES, num_local_experts=EXPERTS)), "selected"),
    "gpt_oss": (lambda: GptOssTopKRouter(GptOssConfig(**SIZES, num_local_experts=EXPERTS)), "selected"),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_routers_become_one_op(name: str, tokens: int, dtype: torch.dtype) -> None:
    make, softmax = ROUTERS[name]
    module = router(make(), dtype)
    compiled = run(lambda x: module(x)[1:], states(tokens, dtype), codegen=tokens == 1 and name == "gpt_oss")
    assert compiled.softmaxes == [softmax]
    assert not any(compiled.counts[target] for target in (EXP, AMAX, DIV, TOPK)), compiled.counts
    casts = 1 if dtype == torch.bfloat16 and name != "mixtral" else 0  # those of `both`
    assert compiled.counts[CAST] == casts + 1


def test_the_router_of_deepseek_keeps_its_operations_around_ours() -> None:
    sizes = {"n_routed_experts": EXPERTS, "num_local_experts": EXPERTS, "n_group": 4, "topk_group": 2}
    config = DeepseekV3Config(**SIZES, **sizes)
    module = router(DeepseekV3TopkRouter(config), torch.float32)

    def by_expert(x: Tensor) -> tuple[Tensor, Tensor]:
        """Its topk is not sorted."""
        _, weights, ids = module(x)
        by_expert = torch.zeros(len(x), EXPERTS).scatter(1, ids, weights)
        return by_expert, by_expert > 0

    compiled = run(by_expert, states(3, torch.float32) / 32)
    assert compiled.counts[TOPK] == 0 and compiled.softmaxes == ["none"] * 3


def with_symbolic_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = x.float().softmax(-1).topk(K)
    return values / values.sum(-1, keepdim=True), ids


def test_the_number_of_tokens_may_be_symbolic() -> None:
    graph_pass = Compiled()
    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": graph_pass}
    compiled = torch.compile(with_symbolic_rows, fullgraph=True, options=options)
    for tokens in (3, 40):
        x = distinct_scores(tokens)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.compiler.set_stance("default" if tokens == 3 else "fail_on_recompile"), torch.no_grad():
            for actual, expected in zip(compiled(x), with_symbolic_rows(x), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert graph_pass.softmaxes == ["selected"]


# Expressions of which only a part is replaced


def probabilities_read_again(x: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = x.float().softmax(-1)
    values, ids = probabilities.topk(K)
    return values + probabilities.sum(-1, keepdim=True), ids


def values_read_again(x: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = x.float().softmax(-1).topk(K)
    return values / values.sum(-1, keepdim=True) + values, ids


def divided_by_more_than_the_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = x.float().softmax(-1).topk(K)
    return values / (values.sum(-1, keepdim=True) + 1), ids


def rounded_probabilities(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(-1).topk(K)  # type: ignore[return-value]


def softmax_over_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.float().softmax(0).topk(K)  # type: ignore[return-value]


def softmax_of_values_over_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = x.float().topk(K)
    return values.softmax(0), ids


def divided_by_the_sum_of_all(x: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = x.float().softmax(-1).topk(K)
    return values / values.sum(dim=None, keepdim=True), ids


def three_dimensional(x: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = x.view(-1, 4, 16).topk(2)
    return values.flatten(1), ids.flatten(1)


def ids_only(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.float().softmax(-1).topk(K).indices


@pytest.mark.parametrize(
    ("function", "softmax"),
    [
        (probabilities_read_again, "all"), (values_read_again, "all"), (divided_by_more_than_the_sum, "all"),
        (rounded_probabilities, "none"), (softmax_over_tokens, "none"), (softmax_of_values_over_tokens, "none"),
        (divided_by_the_sum_of_all, "all"), (three_dimensional, "none"), (ids_only, "all"),
    ],
)  # fmt: skip
def test_other_expressions_keep_what_the_op_does_not_compute(
    function: Callable[[Tensor], tuple[Tensor, Tensor]], softmax: str
) -> None:
    compiled = run(function, distinct_scores(3))
    assert compiled.softmaxes == [softmax] and compiled.counts[TOPK] == 0


def smallest(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.topk(K, largest=False)  # type: ignore[return-value]


def along_the_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.topk(2, dim=0)  # type: ignore[return-value]


def many(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.topk(40)  # type: ignore[return-value]


def wide(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([x] * 32, -1).cumsum(-1).topk(K)  # type: ignore[return-value]


def of_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 1000).long().topk(K)  # type: ignore[return-value]


@pytest.mark.parametrize("function", [smallest, along_the_tokens, many, wide, of_integers])
def test_topk_that_the_kernel_does_not_take_stays(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    compiled = run(function, torch.rand(3, HIDDEN))
    assert compiled.softmaxes == [] and compiled.counts[TOPK] == 1
