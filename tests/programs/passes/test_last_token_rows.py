"""Row selection moves above per-token ops and stays below ops that mix tokens; results do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import SymInt, Tensor, nn
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tcdeploy.engine.check.inputs import make_timing_batch
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.variants import DEFAULT, LAST_TOKEN_ROWS, LAST_TOKEN_ROWS_INPLACE
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.passes import last_token_rows
from tcdeploy.programs.passes.post_grad import PostGradPass
from tcdeploy.start.deployment import Deployment
from tcdeploy.start.prepare import prepare
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic
from tests.conftest import TINY, reset_programs
from tests.engine_loop import generate_tokens
from tests.programs.passes.compiled_targets import compile_and_run

aten = torch.ops.aten
ROWS = [3, 0, 63]
LINEAR_ADD = torch.ops.tcdeploy.linear_add_.default
STATIC, SYMBOLIC_TOKENS, SYMBOLIC_ROWS = frozenset[str](), frozenset({"tokens"}), frozenset({"rows"})
SYMBOLIC = SYMBOLIC_TOKENS | SYMBOLIC_ROWS


class RowCountingPass(PostGradPass):
    """Records the rows of every matrix product in the rewritten graph, and of products that accumulate in place.

    A symbol is recorded as "tokens" or "rows", by the graph input that has this size. The passes must not add guards or
    pass symbols as arguments.
    """

    def __init__(self, inplace_residual: bool = False) -> None:
        super().__init__(inplace_residual=inplace_residual)
        self.rows: list[int | str] = []
        self.accumulated_rows: list[int | str] = []

    def __call__(self, graph: Graph) -> None:
        values = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
        inputs = [value for value in values if isinstance(value, Tensor)]
        shape_env = inputs[0].fake_mode.shape_env  # type: ignore[attr-defined]
        num_guards = len(shape_env.guards)
        super().__call__(graph)
        assert len(shape_env.guards) == num_guards
        leaves = [leaf for node in graph.nodes for leaf in tree_leaves((node.args, node.kwargs))]
        assert not any(isinstance(leaf, SymInt) for leaf in leaves)
        names = {str(value.shape[1]): "tokens" for value in inputs if value.ndim == 3}
        names |= {str(value.shape[0]): "rows" for value in inputs if value.dtype == torch.int64}

        def rows_of(node: Node) -> int | str:
            size = node.meta["val"].shape[0]
            return size if isinstance(size, int) else names[str(size)]

        products = [node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]
        self.rows += [rows_of(node) for node in products]
        self.accumulated_rows += [rows_of(node.args[0]) for node in graph.nodes if node.target is LINEAR_ADD]


def rows_of_products(
    function: Callable[[Tensor], Tensor],
    tokens: int = 64,
    width: int = 32,
    codegen: bool = False,
    symbolic: frozenset[str] = STATIC,
    counting_pass: RowCountingPass | None = None,
) -> list[int | str]:
    """Rows of each product in the compiled `function(x)[:, rows]`, whose result must match eager mode."""
    torch.manual_seed(1)
    x, rows, counting_pass = torch.randn(1, tokens, width), torch.tensor(ROWS), counting_pass or RowCountingPass()
    expected = function(x)[:, rows]
    if "tokens" in symbolic:
        mark_dynamic(x, 1, min=2, max=256)
    if "rows" in symbolic:
        mark_dynamic(rows, 0, min=2, max=8)
    select = lambda x, rows: function(x)[:, rows]  # noqa: E731
    out = compile_and_run(select, x, rows, post_grad_pass=counting_pass, codegen=codegen, rows=rows)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
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


@pytest.mark.parametrize("width", [32, 64], ids=["", "as many tokens as columns"])
@pytest.mark.parametrize(
    ("symbolic", "tokens", "rows"),
    [(SYMBOLIC, "tokens", "rows"), (SYMBOLIC_TOKENS, "tokens", 3), (SYMBOLIC_ROWS, 64, "rows")],
    ids=["both", "tokens", "rows"],
)
def test_symbolic_sizes_select_rows_early_as_well(
    symbolic: frozenset[str], tokens: int | str, rows: int | str, width: int
) -> None:
    for bias in (False, True) if symbolic is SYMBOLIC else (True,):
        codegen = width == 32 and symbolic is SYMBOLIC and bias
        products = rows_of_products(Layer(width, bias), width=width, codegen=codegen, symbolic=symbolic)
        assert products == [tokens, rows, rows, rows]


@pytest.mark.parametrize(("symbolic", "tokens", "rows"), [(STATIC, 64, 3), (SYMBOLIC, "tokens", "rows")])
def test_the_last_product_accumulates_into_the_selected_rows(
    symbolic: frozenset[str], tokens: int | str, rows: int | str
) -> None:
    counting_pass = RowCountingPass(inplace_residual=True)
    products = rows_of_products(Layer(32, bias=False), codegen=True, symbolic=symbolic, counting_pass=counting_pass)
    assert (products, counting_pass.accumulated_rows) == ([tokens, rows, rows], [rows])


@pytest.mark.parametrize(("symbolic", "tokens", "rows"), [(STATIC, 64, 3), (SYMBOLIC, "tokens", "rows")])
def test_the_selection_does_not_move_above_ops_that_mix_tokens(
    symbolic: frozenset[str], tokens: int | str, rows: int | str
) -> None:
    weight = torch.randn(32, 32) / 6
    for mixing in (lambda y: y.cumsum(1), lambda y: y - y.mean(1, keepdim=True), lambda y: y.flip(1)):
        assert rows_of_products(lambda x, mixing=mixing: mixing(x @ weight), symbolic=symbolic) == [tokens]
    assert rows_of_products(lambda x: (x @ weight).view(1, 32, 64).mT + 1) == [64]
    halves = rows_of_products(lambda x: (x @ weight).view(1, 2 * x.shape[1], 16)[:, : x.shape[1]], symbolic=symbolic)
    assert halves == [tokens]


@pytest.mark.parametrize(("symbolic", "rows"), [(STATIC, 3), (SYMBOLIC, "rows")])
def test_the_selection_moves_above_heads_and_scalars(symbolic: frozenset[str], rows: int | str) -> None:
    weight = torch.randn(32, 32) / 6
    heads = rows_of_products(lambda x: (x @ weight).tanh().view(-1, 4, 8).reshape(1, -1, 32) * 2, symbolic=symbolic)
    assert heads == [rows]
    assert rows_of_products(lambda x: (x @ weight) * x.shape[1], symbolic=symbolic) == [rows]


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


@pytest.fixture(params=["bucket", pytest.param("dynamic", marks=pytest.mark.long)])
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployment]:
    """With an empty cache, because the pass runs only when a program is compiled. Other tests compile its kernels."""
    reset_programs()
    flags = {"model": TINY, "buckets": (32,), "batch_sizes": (4,), "context": 256, "mode": "auto", "tune_seconds": 0.0}
    yield prepare(build_recipe({**flags, "shapes": request.param, "cache_dir": str(tmp_path)}, environ={}))
    reset_programs()


def test_the_last_layer_of_a_real_model_selects_rows_early(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix products are those of qkv, o, gate and up, and down. Attention mixes tokens between the first two."""
    rows_of_programs: list[list[Any]] = []
    hoist = last_token_rows._hoist

    def recording_hoist(graph: Graph, selection: Node, source: Node, rows: Node, tokens: int | SymInt) -> None:
        names = {str(tokens): "tokens", str(rows.meta["val"].shape[0]): "rows"}
        hoist(graph, selection, source, rows, tokens)
        products = [node for node in graph.nodes if node.target is aten.mm.default]
        rows_of_programs.append([names[str(node.meta["val"].shape[0])] for node in products])

    monkeypatch.setattr(last_token_rows, "_hoist", recording_hoist)
    runner, [bucket] = deployment.engine.runner, deployment.plan.prefill_buckets
    batch = make_timing_batch(runner, bucket)
    params, prompts = SamplingParams(max_tokens=6), [[5, 6, 7], list(range(100, 200)), [9] * 30]
    answers = []
    for variant, programs in ((DEFAULT, 0), (LAST_TOKEN_ROWS, 1), (LAST_TOKEN_ROWS_INPLACE, 2)):
        runner.set_variant(bucket, variant)
        with measure_compiles() as compiles:
            batch.run()  # may compile, unlike the engine
        assert compiles.counts.programs == programs
        deployment.engine.allocator.reset_prefix_cache()
        answers.append(generate_tokens(deployment.engine, prompts, params))
    assert answers[0] == answers[1] == answers[2]
    assert rows_of_programs == [["tokens", "rows", "rows", "rows"]] * 2, "only the last layer's programs"
    assert runner.step_holder.step is None, "the next step must compute all rows"
