"""Every weight of a checkpoint in a quantisation format is read as the format's own tool reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.models.load_model import load_model
from tcdeploy.models.weights.conversions import CONVERSIONS
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.decide import decide
from tcdeploy.start.planned import PlannedModel
from tests.formats import bitsandbytes, compressed, experts, fp8, int_packed, modelopt, torchao
from tests.formats.checkpoint import Format, save_source, write_checkpoint, write_dense

FORMATS: dict[str, Format] = {
    f"{module.__name__.rpartition('.')[2]}: {name}": form
    for module in (bitsandbytes, compressed, fp8, int_packed, modelopt, torchao)
    for name, form in module.FORMATS.items()
}


def plan(folder: Path, **flags: Any) -> PlannedModel:
    flags = {"buckets": (16,), "batch_sizes": (1,), "kv_blocks": 32, "context": 128, "dtype": "float32", **flags}
    return decide(build_recipe({"model": str(folder), **flags}, environ={}))


def dense_weights(planned: PlannedModel) -> dict[str, Tensor]:
    """The weights of the loaded model in float32, by name, not packed."""
    model = load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, (), planned.traced_model)
    weights = {name: tensor.float() for name, tensor in model.state_dict().items() if ".packed_" not in name}
    for path, module in model.named_modules():
        if isinstance(module, SchemeLinear):
            weights[f"{path}.weight"] = module.dequantised(torch.float32)
            weights |= {f"{path}.bias": module.bias.float()} if module.bias is not None else {}
        elif isinstance(getattr(module, "packed_weight", None), nn.Parameter):
            weights[f"{path}.weight"] = module.weight.float()
    return weights


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("name", FORMATS)
def test_all_weights_are_those_of_the_format(name: str, source: Path, tmp_path: Path) -> None:
    expected = write_checkpoint(FORMATS[name], source, tmp_path / "model")
    weights = dense_weights(plan(tmp_path / "model"))
    for weight_name, values in expected.items():
        assert torch.allclose(weights[weight_name], values, rtol=1e-6, atol=0), weight_name


def test_exponents_of_one_group_per_row_are_not_read_as_integers(tmp_path: Path) -> None:
    """With 32 inputs, the scales [n, 1] in uint8 of MXFP8 have the shape of scales by row."""
    source = save_source(tmp_path / "source", intermediate_size=32)
    expected = write_checkpoint(FORMATS["compressed: mxfp8"], source, tmp_path / "model")
    weights = dense_weights(plan(tmp_path / "model"))
    path = "model.layers.0.mlp.down_proj.weight"
    assert torch.allclose(weights[path], expected[path], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", experts.CASES)
def test_experts_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    """transformers stacks them. A model with the same weights in float32 has equal tensors."""
    case = experts.CASES[name]
    sizes = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "head_dim": None}
    source = save_source(tmp_path / "source", case.family, **(sizes if case.family == "deepseek_v3" else {}))
    dense = write_checkpoint(case.form, source, tmp_path / "model")
    planned, expected = plan(tmp_path / "model"), plan(write_dense(source, dense, tmp_path / "dense"))
    weights, expected_weights = dense_weights(planned), dense_weights(expected)
    assert weights.keys() >= expected_weights.keys()
    for weight_name, values in expected_weights.items():
        assert torch.allclose(weights[weight_name], values, rtol=1e-6, atol=0), weight_name
    assert [decision for decision in planned.plan.decisions if decision.name == "dequantised to float32"]
    assert planned.plan.weight_bytes <= expected.plan.weight_bytes


FAULTS: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {  # a format, a conversion, a change of its result
    "zero point off by one": ("int_packed: awq", "awq_values", lambda values: values + 1),
    "zero points of the next group": ("compressed: int4 asymmetric", "unpacked", lambda values: values.roll(1, -1)),
    "permutation ignored": ("int_packed: gptq act order", "sorted_columns", lambda order: order.sort().values),
    "nibbles in another order": ("int_packed: awq", "awq_nibbles", lambda packed: packed >> 4 | packed << 4),
    "scale inverted": ("compressed: nvfp4", "reciprocal", lambda scale: 1 / scale),
    "scale dropped": ("compressed: mxfp8", "scaled_in_blocks", torch.sign),
    "scale of another row": ("modelopt: fp8", "repeated", lambda scale: scale * (torch.arange(len(scale)) != 3)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_in_a_conversion_changes_weights(
    fault: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above cannot pass by chance."""
    name, conversion, change = FAULTS[fault]
    expected = write_checkpoint(FORMATS[name], source, tmp_path / "model")
    correct = CONVERSIONS[conversion]
    monkeypatch.setitem(CONVERSIONS, conversion, lambda *arguments: change(correct(*arguments)))
    weights = dense_weights(plan(tmp_path / "model"))
    path = "model.layers.1.mlp.up_proj.weight"
    assert not torch.allclose(weights[path], expected[path], rtol=1e-2, atol=1e-4)
