"""Row selection moves above per-token ops and stays below ops that mix tokens; results do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tcdeploy.compiler.compile_stats import measure_compiles
from tcdeploy.engine.sequence import SamplingParams
from tcdeploy.models.packed_linears import pack_linears
from tcdeploy.passes import last_token_rows
from tcdeploy.passes.post_grad import PostGradPass
from tcdeploy.pipeline import Deployment, prepare
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.variants import DEFAULT, LAST_TOKEN_ROWS, LAST_TOKEN_ROWS_INPLACE
from tests.conftest import TINY, reset_programs
from tests.passes.compiled_targets import compile_and_run

aten = torch.ops.aten
ROWS = torch.tensor([3, 0, 63])


class RowCountingPass(PostGradPass):
    """Records the rows of every matrix product in the rewritten graph."""

    def __init__(self) -> None:
        super().__init__(skinny_gemm=False)
        self.rows: list[int] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        products = (node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default))
        self.rows += [node.meta["val"].shape[0] for node in products]


def rows_of_products(
    function: Callable[[Tensor], Tensor], tokens: int = 64, width: int = 32, codegen: bool = False
) -> list[int]:
    """Rows of each product in the compiled `function(x)[:, ROWS]`, whose result must match eager mode."""
    torch.manual_seed(1)
    x, counting_pass = torch.randn(1, tokens, width), RowCountingPass()
    out = compile_and_run(lambda x: function(x)[:, ROWS], x, post_grad_pass=counting_pass, codegen=codegen)
    torch.testing.assert_close(out, function(x)[:, ROWS], rtol=1e-5, atol=1e-5)
    return counting_pass.rows


class Layer(nn.Module):
    """An op that mixes tokens, then the per-token ops of a decoder layer."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.mixed, self.o = nn.Linear(width, width, bias), nn.Linear(width, width, bias)
        self.norm = LlamaRMSNorm(width)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=width, intermediate_size=2 * width, mlp_bias=bias))
        pack_linears(self, (("mlp.gate_proj", "mlp.up_proj"),))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.mixed(x).softmax(dim=1))
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [32, 64], ids=["", "as many tokens as columns"])
def test_a_layer_computes_only_the_selected_rows_after_mixing_tokens(width: int, bias: bool) -> None:
    codegen = width == 32 and bias
    assert rows_of_products(Layer(width, bias), width=width, codegen=codegen) == [64, 3, 3, 3]


def test_the_selection_does_not_move_above_ops_that_mix_tokens() -> None:
    weight = torch.randn(32, 32) / 6
    for mixing in (lambda y: y.cumsum(1), lambda y: y - y.mean(1, keepdim=True), lambda y: y.flip(1)):
        assert rows_of_products(lambda x, mixing=mixing: mixing(x @ weight)) == [64]
    assert rows_of_products(lambda x: (x @ weight).view(1, 32, 64).mT + 1) == [64]
    assert rows_of_products(lambda x: (x @ weight).tanh().view(64, 4, 8).reshape(1, 64, 32) * 2) == [3]


def test_other_index_expressions_are_left_alone() -> None:
    weight, indices = torch.randn(8, 8), torch.tensor([1, 5])
    for selection in ((slice(None), slice(None), indices), (slice(None), indices[None])):
        x, counting_pass = torch.randn(1, 8, 8), RowCountingPass()
        out = compile_and_run(
            lambda x, selection=selection: (x @ weight).tanh()[selection],
            x,
            post_grad_pass=counting_pass,
            codegen=False,
        )
        torch.testing.assert_close(out, (x @ weight).tanh()[selection])
        assert counting_pass.rows == [8]


def test_a_tensor_with_another_reader_is_computed_in_full() -> None:
    weight = torch.randn(32, 32) / 6

    def read_twice(x: Tensor) -> Tensor:
        y = x @ weight
        return y.tanh() + y.sum()

    assert rows_of_products(read_twice) == [64]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """With an empty cache, because the pass runs only when a program is compiled. Other tests compile its kernels."""
    reset_programs()
    flags = {"model": TINY, "buckets": (32,), "batch_sizes": (4,), "context": 256, "mode": "auto", "tune_seconds": 0.0}
    yield prepare(build_recipe({**flags, "cache_dir": str(tmp_path)}, environ={}))
    reset_programs()


def test_the_last_layer_of_a_real_model_selects_rows_early(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    hoisted_tokens: list[int] = []
    hoist = last_token_rows._hoist

    def recording_hoist(graph: Graph, selection: Node, source: Node, rows: Node, tokens: int) -> None:
        hoisted_tokens.append(tokens)
        hoist(graph, selection, source, rows, tokens)

    monkeypatch.setattr(last_token_rows, "_hoist", recording_hoist)
    runner, [bucket] = deployment.engine.runner, deployment.plan.prefill_buckets
    params, prompts = SamplingParams(max_new_tokens=6), [[5, 6, 7], list(range(100, 200)), [9] * 30]
    answers = []
    for variant, programs in ((DEFAULT, 0), (LAST_TOKEN_ROWS, 1), (LAST_TOKEN_ROWS_INPLACE, 2)):
        runner.set_variant(bucket, variant)
        with measure_compiles() as compiles:
            runner.rerun(bucket)  # may compile, unlike the engine
        assert compiles.counts.programs == programs
        deployment.engine.allocator.reset_prefix_cache()
        answers.append(deployment.engine.generate(prompts, params))
    assert answers[0] == answers[1] == answers[2]
    assert hoisted_tokens == [32, 32], "only the last layer's programs"
    assert runner.step_holder.step is None, "the next step must compute all rows"
