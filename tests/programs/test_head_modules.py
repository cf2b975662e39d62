"""Head modules are found by structure and compiled in decode; regions call the program table through a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tcdeploy.kernels.attention.metadata import AttentionConfig, AttentionMetadata, Step, StepHolder
from tcdeploy.models.load import load_config
from tcdeploy.planning.plan import make_plan
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.variants import DEFAULT, PDL_ONLY
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.jit import JitLoader
from tcdeploy.programs.programs import Program, ProgramKey, ProgramTable, compile_in_place
from tcdeploy.programs.regions import Region, find_head_modules, find_layers, regions_to_compile
from tests.conftest import reset_programs
from tests.machines import LAPTOP
from tests.model_families import probe, save_config

HEAD_MODULES = {
    "llama": ["LlamaRMSNorm", "LlamaRotaryEmbedding", "Linear"],
    "gemma3_text": ["Gemma3RMSNorm", "Gemma3RotaryEmbedding", "Linear"],
    "gpt2": ["LayerNorm", "Linear"],
}


@pytest.mark.parametrize("family", HEAD_MODULES)
def test_head_modules_are_found(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = load_config(build_recipe({"model": save_config(family, tmp_path)}, environ={}))
    model = AutoModelForCausalLM.from_config(config)
    head_modules = find_head_modules(model, find_layers(model, probe(config)))
    assert sorted(type(region.module).__name__ for region in head_modules) == sorted(HEAD_MODULES[family])


def test_a_head_module_is_one_program_in_decode_if_the_variant_compiles_it(tmp_path: Path) -> None:
    """torch.compile skips the frames of torch's own modules without a warning, and an LM head is one of them."""
    recipe = build_recipe({"model": save_config("llama", tmp_path), "load_format": "dummy"}, environ={})
    plan = make_plan(recipe, LAPTOP, probe(load_config(recipe)))
    heads = [nn.Linear(64, 128).eval().requires_grad_(False) for _ in range(3)]
    step_holder, table = StepHolder(), ProgramTable(JitLoader(plan, num_regions=3))
    reset_programs()
    compile_in_place([Region("lm_head", head, is_head=True) for head in heads], table, step_holder)
    [prefill, *_], [decode, *_] = plan.prefill_buckets, plan.decode_buckets
    x, programs = torch.randn(4, 64), []
    expected = [nn.functional.linear(x, head.weight, head.bias) for head in heads]
    for bucket, variant in ((prefill, PDL_ONLY), (decode, DEFAULT), (decode, PDL_ONLY)):
        attention = AttentionConfig("reference", "reference", 1)
        step_holder.step = Step(bucket, variant, AttentionMetadata(), attention)
        with torch.no_grad(), measure_compiles() as compiles:
            outputs = [head(x) for head in heads]
        programs.append(compiles.counts.programs)
        for output, reference in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, reference)
    assert programs == [0, 0, 1]
    assert len(table) == 1, "three heads of one kind share the entry"
    reset_programs()


def test_without_a_step_the_modules_run_uncompiled(tmp_path: Path) -> None:
    class NoLoader:
        def load(self, key: ProgramKey) -> Program:
            raise AssertionError(f"{key} was loaded")

    layer, step_holder = nn.Linear(8, 8), StepHolder()
    compile_in_place([Region("layer", layer)], ProgramTable(NoLoader()), step_holder)
    x = torch.randn(2, 8)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_layers_that_attend_differently_are_kinds_of_their_own(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for family, kinds in (("llama", 1), ("gemma3_text", 2)):
        config = load_config(build_recipe({"model": save_config(family, tmp_path / family)}, environ={}))
        model = AutoModelForCausalLM.from_config(config)
        regions = regions_to_compile(find_layers(model, probe(config)), "layer")
        assert len({region.kind for region in regions}) == kinds
        assert [region.is_last for region in regions] == [False] * (len(regions) - 1) + [True]
