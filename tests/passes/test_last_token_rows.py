"""Rows are chosen before what works on each token alone, and after what mixes tokens; the answer stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
import torch._inductor.utils
from torch import Tensor, nn
from torch.fx import Graph, Node
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tcdeploy.compiler.ledger import measure_compiles
from tcdeploy.engine.sequence import SamplingParams
from tcdeploy.models.packed_linears import pack_linears
from tcdeploy.passes import last_token_rows as last_token_rows
from tcdeploy.passes.post_grad import PostGradPass
from tcdeploy.pipeline import Deployment, prepare
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.variants import DEFAULT, LAST_TOKEN_ROWS, LAST_TOKEN_ROWS_INPLACE
from tests.conftest import TINY, reset_programs

aten = torch.ops.aten
ROWS = torch.tensor([3, 0, 63])


class RowCountingPass(PostGradPass):
    """The pass, and the rows of every matrix product that it leaves."""

    def __init__(self) -> None:
        super().__init__(skinny_gemm=False)
        self.rows: list[int] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        products = (node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default))
        self.rows += [node.meta["val"].shape[0] for node in products]


def rows_of_products(function: Callable[[Tensor], Tensor], tokens: int = 64, width: int = 32) -> list[int]:
    """Of `function(x)[:, ROWS]` compiled, which must be what it is uncompiled."""
    torch.manual_seed(1)
    x, seen = torch.randn(1, tokens, width), RowCountingPass()
    reset_programs()
    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        with inductor_config.patch(post_grad_custom_pre_pass=seen):
            found = torch.compile(lambda x: function(x)[:, ROWS], fullgraph=True, dynamic=False)(x)
        torch.testing.assert_close(found, function(x)[:, ROWS], rtol=1e-5, atol=1e-5)
    return seen.rows


class Layer(nn.Module):
    """Something that mixes tokens, then all that a decoder layer does to each token alone."""

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
def test_a_layer_computes_the_chosen_rows_alone_after_what_mixes_tokens(width: int, bias: bool) -> None:
    assert rows_of_products(Layer(width, bias), width=width) == [64, 3, 3, 3]


def test_what_mixes_tokens_is_not_passed() -> None:
    weight = torch.randn(32, 32) / 6
    for mixing in (lambda y: y.cumsum(1), lambda y: y - y.mean(1, keepdim=True), lambda y: y.flip(1)):
        assert rows_of_products(lambda x, mixing=mixing: mixing(x @ weight)) == [64]
    assert rows_of_products(lambda x: (x @ weight).view(1, 32, 64).mT + 1) == [64]
    assert rows_of_products(lambda x: (x @ weight).tanh().view(64, 4, 8).reshape(1, 64, 32) * 2) == [3]


def test_columns_and_tables_of_rows_are_left_alone() -> None:
    weight, chosen = torch.randn(8, 8), torch.tensor([1, 5])
    for choice in ((slice(None), slice(None), chosen), (slice(None), chosen[None])):
        x, seen = torch.randn(1, 8, 8), RowCountingPass()
        reset_programs()
        patched = inductor_config.patch(post_grad_custom_pre_pass=seen)
        with torch.no_grad(), torch._inductor.utils.fresh_cache(), patched:
            compiled = torch.compile(
                lambda x, choice=choice: (x @ weight).tanh()[choice], fullgraph=True, dynamic=False
            )
            torch.testing.assert_close(compiled(x), (x @ weight).tanh()[choice])
        assert seen.rows == [8]


def test_what_others_read_is_computed_whole() -> None:
    weight = torch.randn(32, 32) / 6

    def read_twice(x: Tensor) -> Tensor:
        y = x @ weight
        return y.tanh() + y.sum()

    assert rows_of_products(read_twice) == [64]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """With a cache of its own: a pass sees only what is compiled anew."""
    reset_programs()
    flags = {"model": TINY, "buckets": (64,), "batch_sizes": (2,), "context": 256, "mode": "auto", "tune_seconds": 0.0}
    yield prepare(build_recipe({**flags, "cache_dir": str(tmp_path)}, environ={}))
    reset_programs()


def test_the_last_layer_of_a_real_model_chooses_early_and_says_the_same(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    move_up = last_token_rows._hoist

    def counted(graph: Graph, choice: Node, whole: Node, rows: Node, tokens: int) -> None:
        moved.append(tokens)
        move_up(graph, choice, whole, rows, tokens)

    monkeypatch.setattr(last_token_rows, "_hoist", counted)
    runner, [bucket] = deployment.engine.runner, deployment.plan.prefill_buckets
    params, prompts = SamplingParams(max_new_tokens=6), [[5, 6, 7], list(range(100, 200)), [9] * 30]
    found = []
    for variant, programs in ((DEFAULT, 0), (LAST_TOKEN_ROWS, 1), (LAST_TOKEN_ROWS_INPLACE, 2)):
        runner.set_variant(bucket, variant)
        with measure_compiles() as made:
            runner.rerun(bucket)  # may compile: the engine may not
        assert made.counts.programs == programs
        deployment.engine.allocator.reset_prefix_cache()
        found.append(deployment.engine.generate(prompts, params))
    assert found[0] == found[1] == found[2]
    assert moved == [64, 64], "the last layer's programs, and no other"
    assert runner.slot.step is None, "outside of a step the layers return all rows"
