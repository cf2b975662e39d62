"""Experts that are stored one by one: a missing, surplus or unusual tensor is named before weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tcdeploy.errors import ModelError
from tcdeploy.models.load_errors import recognise
from tcdeploy.models.weights.files import TensorHeader
from tcdeploy.models.weights.tensor_names import check_experts
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tests.coverage.campaign import save_model
from tests.coverage.small_configs import small_config
from tests.model_families import SUPPORTED

EXPERTS = "model.layers.1.block_sparse_moe.experts"


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    config = AutoConfig.for_model("mixtral", **SUPPORTED["mixtral"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def plan_with(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, metadata={"format": "pt"})
    decide(Recipe(model=str(folder)))


@pytest.mark.parametrize("number", [0, 2])
def test_a_missing_tensor_of_an_expert_is_named(mixtral: Path, number: int) -> None:
    name = f"{EXPERTS}.{number}.w1.weight"
    with pytest.raises(ModelError, match=rf"lacks tensors that other experts have \(1\): {name}"):
        plan_with(mixtral, lambda tensors: tensors.pop(name))


def test_a_surplus_tensor_of_an_expert_is_named(mixtral: Path) -> None:
    name = f"{EXPERTS}.2.w4.weight"
    with pytest.raises(ModelError, match=rf"has tensors that other experts do not have \(1\): {name}"):
        plan_with(mixtral, lambda tensors: tensors.update({name: torch.ones(96, 64)}))


def test_experts_of_a_number_that_the_config_does_not_state_are_refused(mixtral: Path) -> None:
    added = {f"{EXPERTS}.4.{name}.weight": torch.ones(shape) for name, shape in
             (("w1", (96, 64)), ("w2", (64, 96)), ("w3", (96, 64)))}  # fmt: skip
    with pytest.raises(ModelError, match="other shapes than config.json describes"):
        plan_with(mixtral, lambda tensors: tensors.update(added))


def test_an_expert_of_another_shape_is_named(mixtral: Path) -> None:
    name = f"{EXPERTS}.2.w1.weight"
    with pytest.raises(ModelError) as error:
        plan_with(mixtral, lambda tensors: tensors.update({name: torch.ones(90, 64)}))
    assert "transformers cannot convert the tensors" in error.value.message
    assert error.value.message.endswith(f"{name} ([90, 64], other experts: [96, 64])")


def test_a_matrix_that_all_experts_lack_is_an_error(mixtral: Path) -> None:
    with pytest.raises(ModelError, match="cannot convert the tensors|lacks"):
        plan_with(mixtral, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith("w1.weight")])


def test_of_two_experts_the_one_with_fewer_tensors_is_incomplete() -> None:
    tensors = {f"experts.{name}": TensorHeader("BF16", (1,)) for name in ("0.w2", "1.w1", "1.w2")}
    with pytest.raises(ModelError, match=r"lacks tensors that other experts have \(1\): experts.0.w1"):
        check_experts("x", tensors)


def test_experts_of_several_shapes_that_transformers_can_load_pass(tmp_path: Path) -> None:
    """Those for text and for images of Ernie 4.5 VL are in one list."""
    save_model(small_config("ernie4_5_vl_moe"), tmp_path)
    decide(Recipe(model=str(tmp_path), buckets=(32,), batch_sizes=(1,)))


def test_a_conversion_that_fails_while_loading_is_an_error_without_a_report() -> None:
    error = recognise("x", RuntimeError("We encountered some issues during automatic conversion of the weights."))
    assert error and "cannot convert the tensors of x" in error.message and error.hint
