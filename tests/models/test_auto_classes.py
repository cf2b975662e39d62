"""The class that loads a model, and models of which only the text is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from tcdeploy.errors import ModelError, UnsupportedModelError
from tcdeploy.models.auto_classes import auto_class, is_multimodal, model_class
from tcdeploy.models.load_model import load_model
from tcdeploy.planning.recipe import Recipe, build_recipe
from tcdeploy.start.decide import decide
from tests.coverage.campaign import save_model
from tests.coverage.small_configs import small_config
from tests.model_families import probe


def test_a_type_with_a_multimodal_class_is_loaded_whole() -> None:
    """Emu3 has both classes; the causal one would leave tensors unused."""
    assert auto_class(AutoConfig.for_model("llama"), trust_remote_code=False) is AutoModelForCausalLM
    assert auto_class(AutoConfig.for_model("emu3"), trust_remote_code=False) is AutoModelForMultimodalLM
    assert auto_class(AutoConfig.for_model("llava"), trust_remote_code=False) is AutoModelForMultimodalLM


@pytest.mark.parametrize(
    ("model_type", "multimodal"),
    [("llama", False), ("gemma3_text", False), ("gemma3", True), ("fuyu", True), ("granite_speech", True)],
)
def test_multimodal_types_are_recognised(model_type: str, multimodal: bool) -> None:
    assert is_multimodal(AutoConfig.for_model(model_type)) == multimodal


def test_the_plan_says_that_image_inputs_are_rejected(tmp_path: Path) -> None:
    small_config("qwen2_5_vl").save_pretrained(tmp_path)
    recipe = {"model": str(tmp_path), "load_format": "dummy", "buckets": (32,), "batch_sizes": (1,)}
    decisions = decide(build_recipe(recipe, environ={})).plan.decisions
    inputs = next(decision for decision in decisions if decision.name == "inputs")
    reason = "qwen2_5_vl is multimodal; image, audio and video inputs are rejected"
    assert (inputs.value, inputs.reason) == ("text only", reason)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("blip-2", "blip-2 requires inputs other than text: 'pixel_values'"),
        ("longcat_flash", "has tensors whose size depends on values of other tensors (aten.nonzero.default)"),
    ],
)
def test_a_type_that_cannot_be_probed_is_refused_with_the_cause(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        probe(small_config(model_type))
    assert reason in error.value.message


@pytest.mark.parametrize("model_type", ["gemma3", pytest.param("qwen2_5_vl", marks=pytest.mark.long)])
def test_unused_tensors_are_refused_unless_they_generate_speech(model_type: str, tmp_path: Path) -> None:
    """Their checkpoints have other names than the loaded model: language_model.model.layers, and model.layers."""
    save_model(small_config(model_type), tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    query = next(name for name in tensors if "layers.0.self_attn.q_proj.weight" in name and "vision" not in name)

    def decide_with(name: str) -> None:
        save_file({**tensors, name: torch.zeros(64)}, weights, metadata={"format": "pt"})
        decide(Recipe(model=str(tmp_path), buckets=(32,), batch_sizes=(1,)))

    for part in ("talker", "token2wav", "code2wav"):
        decide_with(f"{part}.layers.0.weight")
    for name in (
        query.replace("q_proj.weight", "o_proj.bias"),
        query.replace("layers.0.", "layers.9."),
        query.replace("q_proj.weight", "q_proj.lora_A.weight"),
        f"base_model.model.{query}",
        "score.weight",
        "custom_text_proj.weight",
        "text_model.layers.0.mlp.weight",
        "talker_text_model.weight",
    ):
        with pytest.raises(ModelError, match=r"has tensors that the model does not use \(1\): "):
            decide_with(name)


REMOTE_CODE = """
from transformers import Mistral3ForConditionalGeneration
class MyForCausalLM(Mistral3ForConditionalGeneration):
    pass
"""


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_trusted_code_takes_precedence_over_a_multimodal_class(load_format: str, tmp_path: Path) -> None:
    config = small_config("mistral3")
    save_model(config, tmp_path)
    config.auto_map = {"AutoModelForCausalLM": "modeling_my.MyForCausalLM"}
    config.save_pretrained(tmp_path)
    (tmp_path / "modeling_my.py").write_text(REMOTE_CODE)
    for trust_remote_code, name in ((True, "MyForCausalLM"), (False, "Mistral3ForConditionalGeneration")):
        values = {"model": str(tmp_path), "load_format": load_format, "trust_remote_code": trust_remote_code}
        planned = decide(build_recipe({**values, "buckets": (32,), "batch_sizes": (1,)}, environ={}))
        assert planned.architecture.class_name == name
        assert type(load_model(planned.plan, planned.config, "sdpa", ())).__name__ == name
        assert (model_class(planned.config, trust_remote_code) is None) == trust_remote_code
