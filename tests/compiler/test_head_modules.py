"""What runs before and after the layers: found by structure, and compiled in decode though torch made the module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tcdeploy.attention.interface import empty_attention_metadata
from tcdeploy.compiler.ledger import measure_compiles
from tcdeploy.compiler.programs import compile_regions
from tcdeploy.compiler.regions import find_head_modules, find_layers
from tcdeploy.models.load import load_config
from tcdeploy.models.probe import probe
from tcdeploy.planning.plan import make_plan
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.variants import DEFAULT, PDL_ONLY
from tests.conftest import reset_programs
from tests.machines import LAPTOP
from tests.model_families import save_config

HEAD_MODULES = {
    "llama": ["LlamaRMSNorm", "LlamaRotaryEmbedding", "Linear"],
    "gemma3_text": ["Gemma3RMSNorm", "Gemma3RotaryEmbedding", "Linear"],
    "gpt2": ["LayerNorm", "Linear"],
}


@pytest.mark.parametrize("family", HEAD_MODULES)
def test_the_neighbours_of_the_layers_are_found(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = load_config(build_recipe({"model": save_config(family, tmp_path)}, environ={}))
    model = AutoModelForCausalLM.from_config(config)
    head_modules = find_head_modules(model, find_layers(model, probe(config)))
    assert sorted(type(head_module).__name__ for head_module in head_modules) == sorted(HEAD_MODULES[family])


def test_an_edge_is_one_program_in_decode_where_the_candidate_says_so_and_runs_eagerly_else(tmp_path: Path) -> None:
    """A head is torch's own module, whose frames torch would run uncompiled without a word."""
    recipe = build_recipe({"model": save_config("llama", tmp_path), "load_format": "dummy"}, environ={})
    architecture = probe(load_config(recipe))
    plan = make_plan(recipe, LAPTOP, architecture)
    step = empty_attention_metadata(plan, architecture)
    heads = [nn.Linear(64, 128).eval().requires_grad_(False) for _ in range(3)]
    reset_programs()
    compile_regions([], list(heads), plan, step)
    x, counts = torch.randn(4, 64), []
    wanted = [nn.functional.linear(x, head.weight, head.bias) for head in heads]
    for step.is_prefill, step.variant in ((True, PDL_ONLY), (False, DEFAULT), (False, PDL_ONLY)):
        with torch.no_grad(), measure_compiles() as found:
            outputs = [head(x) for head in heads]
        counts.append(found.counts.programs)
        for output, plain in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(output, plain)
    assert counts == [0, 0, 1]
    reset_programs()
