"""Mixtures of experts that run our experts function give the tokens of transformers' generate()."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.kernels.experts import interface
from tcdeploy.kernels.experts.interface import EXPERTS_IMPLEMENTATION, run_experts
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.prepare import prepare
from tcdeploy.torch_compat.transformers.experts_interface import supports_experts_interface
from tests.coverage.campaign import traced_only
from tests.engine_loop import generate_tokens
from tests.formats.checkpoint import save_source

PROMPTS = [list(range(40, 60)), [5, 6, 7]]
NEW_TOKENS = 16
LATENT_SIZES = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "head_dim": None}
FAMILIES: dict[str, dict[str, Any]] = {  # gpt_oss has transposed weights, biases and a gate of its own
    "qwen3_moe": {}, "gpt_oss": {}, "mixtral": {}, "deepseek_v3": LATENT_SIZES, "olmoe": {}, "qwen2_moe": {},
    "ernie4_5_moe": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("family", "compiles"),
    [("gpt_oss", False), *(pytest.param(name, True, marks=pytest.mark.long) for name in FAMILIES)],
)
def test_tokens_equal_those_of_generate(family: str, compiles: bool, tmp_path: Path, cache_dir: Path) -> None:
    """Programs are compiled with scripts/test --long, and otherwise only traced."""
    changes = {"tie_word_embeddings": False, **FAMILIES[family]}
    folder = str(save_source(tmp_path / family, family, torch.float32, **changes))
    flags: dict[str, Any] = {"model": folder, "buckets": (32,), "batch_sizes": (4,), "context": 64, "dtype": "float32"}
    with contextlib.nullcontext() if compiles else traced_only():
        deployment = prepare(build_recipe({**flags, "cache_dir": str(cache_dir)}, environ={}))
        tokens = generate_tokens(deployment.engine, PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
    assert deployment.engine.runner.model.config._experts_implementation == EXPERTS_IMPLEMENTATION
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    expected = [model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    assert tokens == expected and len(set(tokens[0])) > 2


class Config:
    num_experts, hidden, intermediate = 5, 8, 12


def make_experts(
    has_gate: bool = True, has_bias: bool = False, is_transposed: bool = False, has_norm: bool = False
) -> Any:
    """Experts as transformers' decorator makes them, with random weights."""

    class Experts(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.num_experts, self.act_fn = config.num_experts, nn.SiLU()
            self.post_expert_norm = nn.RMSNorm(config.hidden) if has_norm else nn.Identity()
            rows = (2 if has_gate else 1) * config.intermediate
            for name, n, k in (
                ("gate_up_proj" if has_gate else "up_proj", rows, config.hidden),
                ("down_proj", config.hidden, config.intermediate),
            ):
                shape = (config.num_experts, k, n) if is_transposed else (config.num_experts, n, k)
                self.register_parameter(name, nn.Parameter(torch.randn(shape)))
                if has_bias:
                    self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(config.num_experts, n)))

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            raise NotImplementedError

    norm = {"has_post_expert_norm": True} if has_norm else {}
    decorate = use_experts_implementation(is_transposed=is_transposed, has_bias=has_bias, has_gate=has_gate, **norm)
    torch.manual_seed(0)
    return decorate(Experts)(Config()).requires_grad_(False)


def inputs(tokens: int = 7, top_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(Config.num_experts)[:top_k] for _ in range(tokens)])
    return torch.randn(tokens, Config.hidden), ids, torch.rand(tokens, top_k)


KINDS: dict[str, dict[str, bool]] = {
    "gate": {}, "no gate": {"has_gate": False}, "biases": {"has_bias": True},
    "transposed": {"is_transposed": True}, "all": {"has_bias": True, "is_transposed": True, "has_norm": True},
}  # fmt: skip
HAS_NORMS = "has_post_expert_norm" in inspect.signature(use_experts_implementation).parameters  # not in 5.17


@pytest.mark.parametrize("kind", KINDS)
def test_traced_experts_compute_what_transformers_computes(kind: str) -> None:
    """The op is in the graph, and the result is that of transformers' function that multiplies pair by pair."""
    kinds = {**KINDS[kind], "has_norm": KINDS[kind].get("has_norm", False) and HAS_NORMS}
    experts, arguments = make_experts(**kinds), inputs()
    expected = ALL_EXPERTS_FUNCTIONS["batched_mm"](experts, *arguments)
    traced = torch.compile(run_experts, fullgraph=True, backend="aot_eager")(experts, *arguments)
    torch.testing.assert_close(traced, expected)
    torch.testing.assert_close(run_experts(experts, *arguments), expected)


def test_traced_experts_call_the_ops_and_eager_dense_experts_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(run_experts, fullgraph=True, backend=record)(make_experts(), *inputs())
    names = [str(node.target) for node in graphs[0].graph.nodes if str(node.target).startswith("tcdeploy.")]
    assert names == ["tcdeploy.group_pairs.default", *["tcdeploy.expert_linear.default"] * 2]
    monkeypatch.delattr(interface, "ops")
    assert run_experts(make_experts(), *inputs()).shape == (7, Config.hidden)


def test_only_classes_with_transformers_decorator_support_the_interface() -> None:
    assert supports_experts_interface(make_experts())
    assert not supports_experts_interface(nn.Linear(2, 2))
