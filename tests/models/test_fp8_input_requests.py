"""Which checkpoints ask for inputs in FP8, and how that reaches the plan, compile workers and layers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedConfig

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers the schemes
from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.convert.quantise_model import quantise_model
from tcdeploy.models.convert.scheme_linear import SchemeLinear, quantise_inputs
from tcdeploy.models.formats.methods import EXPLICIT, has_fp8_inputs
from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tcdeploy.start.workers.parallel import make_short_copy
from tests.conftest import TINY

FP8, INT8 = {"type": "float", "num_bits": 8}, {"type": "int", "num_bits": 8}


def compressed(*groups: tuple[Any, Any]) -> dict[str, Any]:
    """Settings with groups of weights and input activations."""
    stated = {
        f"group_{number}": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        for number, (weights, inputs) in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "config_groups": stated}


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, True),
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "fp8", "activation_scheme": None}, False),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, True),
        (compressed((FP8, {**FP8, "dynamic": True})), True),
        (compressed((FP8, None)), False),
        (compressed((FP8, INT8)), False),
        (compressed((FP8, FP8), ({"type": "int", "num_bits": 4}, None)), True),
        (compressed((FP8, FP8), (FP8, None)), False),
        (compressed((INT8, FP8)), False),
        ({"quant_method": "compressed-tensors"}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
        (
            {
                "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
            },
            True,
        ),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}}, False),
        ({"quant_method": "gptq", "bits": 8}, False),
        ({"quant_method": "unknown"}, False),
    ],
)  # fmt: skip
def test_the_config_says_whether_inputs_are_fp8(settings: dict[str, Any], asks: bool) -> None:
    assert has_fp8_inputs(PreTrainedConfig(quantization_config=settings)) == asks


def test_a_dense_checkpoint_asks_for_nothing() -> None:
    assert not has_fp8_inputs(PreTrainedConfig())


@pytest.mark.parametrize(("quantize", "asks"), [("fp8", True), ("int8", False), ("int4:64", False)])
def test_quantising_while_loading_asks_for_fp8_inputs_with_fp8_weights(quantize: str, asks: bool) -> None:
    recipe = Recipe(model=TINY, quantize=quantize, buckets=(16,), batch_sizes=(1,), kv_blocks=32, context=128)
    planned = decide(recipe)
    assert planned.architecture.fp8_inputs == asks
    stated = make_short_copy(planned.fake_model, planned).config["quantization_config"]
    assert (stated["quant_method"], stated["fp8_inputs"]) == (EXPLICIT, asks)
    assert has_fp8_inputs(PreTrainedConfig(quantization_config=stated)) == asks
    assert planned.plan.fp8_min_rows == 0, "a CPU does not multiply FP8"


def test_layers_get_the_number_of_rows_after_they_are_packed() -> None:
    def layer() -> nn.Linear:
        return nn.Linear(512, 128, bias=False)

    model = nn.ModuleDict({name: layer() for name in ("q", "k", "o", "int8", "head")}).requires_grad_(False)
    quantise_model(model, lambda path: LayerScheme("int8" if path == "int8" else "fp8_block"))
    pack_linears(model, (("q", "k"),))
    quantise_inputs([module for name, module in model.items() if name != "head"], 33)
    rows = {name: item.fp8_min_rows for name, item in model.items() if isinstance(item, SchemeLinear)}
    assert rows == {"q": 33, "k": 33, "o": 33, "int8": 0, "head": 0}
