"""Every weight of a checkpoint in a quantisation format is read as the format's own tool reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION
from tcdeploy.models.convert import quantised_weights
from tcdeploy.models.convert.scheme_experts import JoinedTensors, join_scheme_tensors
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.models.convert.scheme_weight import SchemeExperts
from tcdeploy.models.load_model import load_model
from tcdeploy.models.weights.conversions import CONVERSIONS
from tcdeploy.models.weights.sources import Source, stored_names
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.decide import decide
from tcdeploy.start.planned import PlannedModel
from tcdeploy.start.workers.parallel import make_short_copy
from tests.formats import bitsandbytes, compressed, experts, fp8, int_packed, modelopt, torchao
from tests.formats.checkpoint import Format, change_json, save_source, write_checkpoint, write_dense

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
        if isinstance(module, SchemeExperts):
            dense = module.dequantised(torch.float32)
            is_transposed = model.get_submodule(path.rpartition(".")[0]).is_transposed
            weights[path] = dense.transpose(1, 2) if is_transposed else dense
        elif isinstance(module, SchemeLinear):
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
    source = save_experts(name, tmp_path / "source")
    dense = write_checkpoint(experts.CASES[name].form, source, tmp_path / "model")
    planned, expected = plan(tmp_path / "model"), plan(write_dense(source, dense, tmp_path / "dense"))
    weights, expected_weights = dense_weights(planned), dense_weights(expected)
    assert weights.keys() >= expected_weights.keys()
    for weight_name, values in expected_weights.items():
        assert torch.allclose(weights[weight_name], values, rtol=1e-6, atol=0), weight_name
    reasons = [decision.reason for decision in planned.plan.decisions if decision.name == "dequantised to float32"]
    stacks = dict(planned.architecture.expert_schemes)
    layers = sum(name.endswith("experts.down_proj") for name in expected_weights)
    if name == "gptq":  # down projections have one group of columns, whose order is that of the model
        reason = "each expert has its own order of columns"
        assert (reasons, stacks) == ([reason], {"int4_float16": layers})
    else:
        assert (reasons, stacks) == ([], {SCHEMES_OF_EXPERTS[name]: 2 * layers})


SCHEMES_OF_EXPERTS = {
    "gpt-oss": "mxfp4", "fp8 qwen3": "fp8_block", "fp8 deepseek": "fp8_block", "int4": "int4_bfloat16",
    "nvfp4": "nvfp4", "mxfp4 experts only": "mxfp4", "modelopt nvfp4": "nvfp4", "awq": "int4_float16_zeros",
}  # fmt: skip
LATENT_SIZES = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "head_dim": None}


def save_experts(name: str, folder: Path) -> Path:
    """A dense model of the family of a case."""
    family = experts.CASES[name].family
    return save_source(folder, family, **(LATENT_SIZES if family == "deepseek_v3" else {}))


@pytest.mark.parametrize("name", ["gpt-oss", "fp8 qwen3", "fp8 deepseek", "int4", "mxfp4 experts only"])
def test_experts_take_the_bytes_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    write_checkpoint(experts.CASES[name].form, save_experts(name, tmp_path / "source"), tmp_path / "model")
    planned = plan(tmp_path / "model", dtype="bfloat16")
    stored_bytes = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert 0.9 * stored_bytes < planned.plan.weight_bytes <= 1.05 * stored_bytes
    model = load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, (), planned.traced_model)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    assert planned.plan.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("name", [name for name in experts.CASES if name != "gptq"])
def test_random_experts_have_the_tensors_of_loaded_ones(name: str, tmp_path: Path) -> None:
    """Schemes follow from the checkpoint's config, or from that of compile workers. GPTQ's config lacks group sizes."""
    write_checkpoint(experts.CASES[name].form, save_experts(name, tmp_path / "source"), tmp_path / "model")
    planned = plan(tmp_path / "model")
    short_copy = make_short_copy(planned.fake_model, planned)
    change_json(tmp_path / "source" / "config.json", short_copy.config)
    plans = (planned, plan(tmp_path / "model", load_format="dummy"), plan(tmp_path / "source", load_format="dummy"))
    loaded, random, of_worker = (expert_tensors(item) for item in plans)
    assert loaded == random and loaded
    assert of_worker and of_worker.items() <= loaded.items()


ONE_GROUP = compressed.compressed(
    compressed.config("pack-quantized", compressed.group(compressed.arguments(4, "int", "channel", group_size=-1)))
)
RANDOM_LAYERS: dict[str, Format] = {
    "awq one group": int_packed.awq(group_size=-1),
    "gptq one group, act order": int_packed.gptq(group_size=-1, desc_act=True),
    "auto-round awq": int_packed.auto_round("auto_round:auto_awq"),
    "compressed-tensors one group": ONE_GROUP,
}


@pytest.mark.parametrize("name", RANDOM_LAYERS)
def test_random_layers_have_the_tensors_of_loaded_ones(name: str, source: Path, tmp_path: Path) -> None:
    write_checkpoint(RANDOM_LAYERS[name], source, tmp_path / "model")
    plans = (plan(tmp_path / "model"), plan(tmp_path / "model", load_format="dummy"))
    loaded, random = (parameter_kinds(item) for item in plans)
    assert loaded == random and any(name.endswith("weight_scale") for name in loaded)


def parameter_kinds(planned: PlannedModel) -> dict[str, tuple[torch.dtype, torch.Size]]:
    packed_linears = planned.architecture.packed_linears
    model = load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, packed_linears, planned.traced_model)
    return {name: (tensor.dtype, tensor.shape) for name, tensor in model.named_parameters()}


def expert_tensors(planned: PlannedModel) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: kind for name, kind in parameter_kinds(planned).items() if ".experts." in name}


def swap_first(source: Source) -> Source:
    kind, dim, [first, second, *others] = source
    return [kind, dim, [second, first, *others]]


def exchange_halves(source: Source) -> Source:
    """Up before gate, in all experts."""
    return ["stack", 0, [swap_first(pair) for pair in source[2]]]


def repeat_first_half(source: Source) -> Source:
    return ["stack", 0, [["cat", 0, [pair[2][0]] * 2] for pair in source[2]]]


EXPERT_FAULTS: dict[str, tuple[int, Callable[[Source], Source]]] = {  # a tensor of the scheme, a change of its source
    "scales of two experts swapped": (1, swap_first),
    "two experts swapped": (0, swap_first),
    "gate and up swapped": (0, exchange_halves),
    "scales of gate and up swapped": (1, exchange_halves),
    "scale of up dropped": (1, repeat_first_half),
}


@pytest.fixture(scope="module")
def stored_experts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    """The checkpoint of a case and its weights, which all mistakes share."""

    @functools.cache
    def store(name: str) -> tuple[Path, dict[str, Tensor]]:
        folder = tmp_path_factory.mktemp("experts")
        write_checkpoint(experts.CASES[name].form, save_experts(name, folder / "source"), folder / "model")
        return folder / "model", dense_weights(plan(folder / "model"))

    return store


@pytest.mark.parametrize("name", ["fp8 qwen3", "int4"])
@pytest.mark.parametrize("fault", EXPERT_FAULTS)
def test_a_mistake_in_joining_experts_changes_weights(
    fault: str,
    name: str,
    stored_experts: Callable[[str], tuple[Path, dict[str, Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, change = EXPERT_FAULTS[fault]
    model, expected = stored_experts(name)

    def join_wrongly(source: Source, *arguments: Any) -> JoinedTensors:
        joined = join_scheme_tensors(source, *arguments)
        tensors = list(joined.tensors)
        if "up_proj" in "".join(stored_names(source)):
            tensors[index] = tensors[index]._replace(source=change(tensors[index].source))
        return joined._replace(tensors=tuple(tensors))

    monkeypatch.setattr(quantised_weights, "join_scheme_tensors", join_wrongly)
    weights = dense_weights(plan(model))
    path = "model.layers.1.mlp.experts"
    assert not torch.allclose(weights[f"{path}.gate_up_proj"], expected[f"{path}.gate_up_proj"], rtol=1e-2, atol=1e-4)
    assert torch.equal(weights[f"{path}.down_proj"], expected[f"{path}.down_proj"])


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
