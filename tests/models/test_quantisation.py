"""Experts of gpt-oss in MXFP4 stay as they are stored; quantised models of other methods are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import ModelError
from tcdeploy.models.convert.scheme_weight import SchemeExperts
from tcdeploy.models.load_model import load_model
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tcdeploy.start.prepare import prepare
from tests.engine_loop import generate_tokens
from tests.exported_programs import exported_programs
from tests.machines import decision_named
from tests.model_families import SUPPORTED

FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4_VALUES = torch.cat([FP4_VALUES, -FP4_VALUES])  # by the four bits of a value
SIZES = {**SUPPORTED["gpt_oss"], "intermediate_size": 64}  # inputs are a multiple of 32
METHOD = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
DTYPES = ("float32", "bfloat16", "float16")
EXPERTS = "model.layers.0.mlp.experts"
WEIGHTS = "model.safetensors"


class Folders(NamedTuple):
    """The same weights twice: with experts in MXFP4, as openai/gpt-oss stores them, and all in bfloat16."""

    quantised: Path
    plain: Path


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", **SIZES, dtype="bfloat16")
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    plain = {name: torch.randn_like(tensor) * 0.3 for name, tensor in plain.items()}
    quantised = dict(plain)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = plain[name].shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 127, (experts, outputs, inputs // 32), dtype=torch.uint8)
        del quantised[name]
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = dequantise(blocks, scales).bfloat16()
    folders = Folders(tmp_path / "quantised", tmp_path / "plain")
    for folder, tensors, values in ((folders[0], quantised, {"quantization_config": METHOD}), (folders[1], plain, {})):
        config.save_pretrained(folder)
        change_config(folder, **values)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folders


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[experts, outputs, groups, 16] and [experts, outputs, groups] -> [experts, inputs, outputs]."""
    values = torch.stack([FP4_VALUES[(blocks & 15).long()], FP4_VALUES[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2).contiguous()


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load(folder: Path, dtype: str, load_format: str = "auto") -> PreTrainedModel:
    fields: Any = {"dtype": dtype, "load_format": load_format}
    planned = decide(Recipe(model=str(folder), **fields))
    return load_model(planned.plan, planned.config, "eager", planned.architecture.packed_linears, planned.traced_model)


def rejection(folder: Path, **fields: Any) -> str:
    with pytest.raises(ModelError) as error:
        decide(Recipe(model=str(folder), **fields))
    assert error.value.hint
    return error.value.message


# MXFP4


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loaded_model_equals_one_with_dequantised_weights(folders: Folders, dtype: str) -> None:
    quantised, plain = (load(folder, dtype) for folder in folders)
    expected, tensors = plain.state_dict(), quantised.state_dict()
    assert type(quantised.get_submodule(EXPERTS)) is type(plain.get_submodule(EXPERTS))
    stored = load_file(folders.quantised / WEIGHTS)
    for path, module in quantised.named_modules():
        if isinstance(module, SchemeExperts):
            weight, scale = (tensors.pop(f"{path}.{suffix}") for suffix in ("weight", "weight_scale"))
            assert torch.equal(weight, stored[f"{path}_blocks"].flatten(2)), "bytes are not reordered"
            assert torch.equal(scale, stored[f"{path}_scales"])
            tensors[path] = module.dequantised(getattr(torch, dtype)).transpose(1, 2)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_weights_have_the_shapes_and_dtypes_of_loaded_ones(folders: Folders, dtype: str) -> None:
    loaded, random = (
        {
            name: (tensor.shape, tensor.dtype)
            for name, tensor in load(folders.quantised, dtype, kind).state_dict().items()
        }
        for kind in ("auto", "dummy")
    )
    assert loaded == random


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_shows_mxfp4_and_has_the_memory_of_the_stored_weights(
    folders: Folders, dtype: Any, load_format: Any
) -> None:
    planned, plain = (decide(Recipe(model=str(folder), dtype=dtype, load_format=load_format)) for folder in folders)
    quantised, stored = planned.plan, load_file(folders.quantised / WEIGHTS)
    decision = decision_named(quantised, "weights")
    layers = SIZES["num_hidden_layers"]
    assert decision.value == f"{2 * layers} stacks of experts in mxfp4"
    assert decision.reason == f"quantised with mxfp4; others are {dtype}"
    assert [decision for decision in plain.plan.decisions if decision.name == "weights"] == []
    assert not [item for item in quantised.decisions if item.name in ("loading", f"dequantised to {dtype}")]
    packed_bytes = sum(item.nbytes for name, item in stored.items() if name.endswith(("_blocks", "_scales")))
    dense_elements = 2 * sum(item.numel() for name, item in stored.items() if name.endswith("_blocks"))
    dense_bytes = dense_elements * getattr(torch, dtype).itemsize
    assert quantised.weight_bytes == plain.plan.weight_bytes - dense_bytes + packed_bytes
    largest = max(math.prod(item.shape[1:]) * 2 for name, item in stored.items() if name.endswith("_blocks"))
    assert planned.architecture.largest_scheme_elements == largest, "of one expert"
    tensors = load(folders.quantised, dtype)
    assert quantised.weight_bytes == sum(
        tensor.nbytes for tensor in dict([*tensors.named_parameters(), *tensors.named_buffers()]).values()
    )


@pytest.mark.compiles
@pytest.mark.long
def test_tokens_equal_those_of_transformers_with_dequantised_weights(folders: Folders, tmp_path: Path) -> None:
    """As in formats/test_format_starts.py, with weights of this file. Without Inductor."""
    recipe = Recipe(
        model=str(folders.quantised), buckets=(16,), batch_sizes=(1,), programs="aot", dtype="float32",
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    prompt = [5, 9, 77, 130, 200, 3, 4]
    with exported_programs():
        [tokens] = generate_tokens(prepare(recipe).engine, [prompt], SamplingParams(max_tokens=24))
    reference = AutoModelForCausalLM.from_pretrained(folders.plain, dtype=torch.float32, attn_implementation="eager")
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    assert list(tokens) == expected.tolist()
    assert len(set(tokens)) > 8


def test_missing_and_unexpected_tensors_are_named(folders: Folders) -> None:
    change_tensors(folders.quantised, lambda tensors: tensors.update({f"{EXPERTS}.extra": torch.ones(2)}))
    assert f"tensors that the model does not use (1): {EXPERTS}.extra" in rejection(folders.quantised)
    change_tensors(folders.quantised, lambda tensors: tensors.pop("model.norm.weight"))
    assert "lacks 1 of the model's tensors: model.norm.weight" in rejection(folders.quantised)


@pytest.mark.parametrize("name", ["gate_up_proj_scales", "down_proj_blocks"])
def test_blocks_without_scales_are_refused(folders: Folders, name: str) -> None:
    change_tensors(folders.quantised, lambda tensors: tensors.pop(f"{EXPERTS}.{name}"))
    assert rejection(folders.quantised) == f"the checkpoint of {folders.quantised} lacks {EXPERTS}.{name}"


@pytest.mark.parametrize("shape", [(), (4,), (4, 128)])
def test_scales_with_too_few_dimensions_are_refused(folders: Folders, shape: tuple[int, ...]) -> None:
    scales, blocks = torch.ones(shape, dtype=torch.uint8), torch.ones(*shape, 16, dtype=torch.uint8)
    names = (f"{EXPERTS}.down_proj_scales", f"{EXPERTS}.down_proj_blocks")
    change_tensors(folders.quantised, lambda tensors: tensors.update(zip(names, (scales, blocks), strict=True)))
    message = rejection(folders.quantised)
    assert message.startswith(f"{names[0]} of {folders.quantised} is stored as uint8 {[*shape]}; it must be")


def test_blocks_of_another_shape_than_scales_are_refused(folders: Folders) -> None:
    name = f"{EXPERTS}.down_proj_blocks"
    change_tensors(folders.quantised, lambda tensors: tensors.update({name: tensors[name][:, :, :1].contiguous()}))
    assert f"{name} of {folders.quantised} is stored as uint8 [4, 64, 1, 16]" in rejection(folders.quantised)


def test_weights_beside_the_experts_may_not_be_quantised(folders: Folders) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    change_tensors(folders.quantised, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    assert rejection(folders.quantised).endswith(f"not supported yet: {name} has the dtype I8")


def test_experts_of_another_size_are_refused(folders: Folders) -> None:
    change_config(folders.quantised, intermediate_size=96)
    assert "[4, 64, 128] instead of [4, 64, 192]" in rejection(folders.quantised)


def test_mxfp4_tensors_without_the_method_in_the_config_are_refused(folders: Folders) -> None:
    config = json.loads((folders.quantised / "config.json").read_text())
    del config["quantization_config"]
    (folders.quantised / "config.json").write_text(json.dumps(config))
    assert "has quantised weights, which are not supported yet" in rejection(folders.quantised)


# Settings without a method


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("with_both_names", [False, True])
def test_mlx_is_recognised_by_its_settings(with_both_names: bool, load_format: Any, tmp_path: Path) -> None:
    """Newer versions of MLX write them under both names."""
    AutoConfig.for_model("gpt_oss", **SIZES).save_pretrained(tmp_path)
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    change_config(tmp_path, quantization=settings, **({"quantization_config": settings} if with_both_names else {}))
    assert "is quantised with MLX, which is not supported yet" in rejection(tmp_path, load_format=load_format)


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_empty_settings_are_refused(name: str, tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **SUPPORTED["llama"]).save_pretrained(tmp_path)
    change_config(tmp_path, **{name: {}})
    for load_format in ("auto", "dummy"):
        assert "is quantised with an unknown method" in rejection(tmp_path, load_format=load_format)
    change_config(tmp_path, **{name: None})
    assert decide(Recipe(model=str(tmp_path), load_format="dummy")).plan
