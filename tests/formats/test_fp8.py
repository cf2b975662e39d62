"""Checkpoints of `quant_method` "fp8", compared with the definition, with transformers and with compressed-tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.quantizers_utils import should_convert_module

from tests.formats.checkpoint import random_weight, write_checkpoint
from tests.formats.fp8 import FORMATS, is_listed, value_at
from tests.formats.layers import Kind, decode, layer_kinds, relative_error, store_layer

LAYER = "model.layers.1.self_attn.k_proj"
WEIGHT: Kind = (torch.float8_e4m3fn, (64, 256))
SCALES: dict[str, dict[str, Kind]] = {
    "deepseek": {"weight_scale_inv": (torch.float32, (1, 2))},
    "deepseek ue8m0": {"weight_scale_inv": (torch.float32, (1, 2))},
    "e8m0": {"weight_scale_inv": (torch.float8_e8m0fnu, (1, 2))},
    "qwen3": {"weight_scale_inv": (torch.bfloat16, (1, 2))},
    "minimax": {"weight_scale_inv": (torch.float32, (1, 2))},
    "ministral": {"weight_scale_inv": (torch.bfloat16, ()), "activation_scale": (torch.bfloat16, ())},
    "autofp8 static": {"weight_scale": (torch.float32, ()), "input_scale": (torch.float32, ())},
    "autofp8 dynamic": {"weight_scale": (torch.float32, ())},
    "fbgemm": {"weight_scale": (torch.float32, (64, 1)), "input_scale_ub": (torch.float32, (1,))},
}
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "deepseek": lambda scale: scale.flip(1),
    "deepseek ue8m0": torch.reciprocal,
    "e8m0": lambda scale: (scale.view(torch.uint8) + 1).view(torch.float8_e8m0fnu),
    "qwen3": lambda scale: scale.T.contiguous().view(scale.shape).flip(1),
    "ministral": torch.ones_like,
    "autofp8 static": torch.reciprocal,
    "fbgemm": lambda scale: scale.roll(1, 0),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_returned_weight_is_the_stored_one_by_definition(name: str) -> None:
    stored = store_layer(FORMATS[name])
    shape = stored.weight.shape
    torch.testing.assert_close(decode(value_at, stored.tensors, shape), stored.weight, rtol=1e-6, atol=0)
    assert 0.01 < relative_error(stored.weight, random_weight(*shape)) < 0.04


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_scale_changes_the_weight(name: str) -> None:
    stored = store_layer(FORMATS[name])
    [scale] = stored.tensors.keys() & {"weight_scale", "weight_scale_inv"}
    tensors = {**stored.tensors, scale: FAULTS[name](stored.tensors[scale])}
    assert relative_error(decode(value_at, tensors, stored.weight.shape), stored.weight) > 0.1


@pytest.mark.parametrize("name", ["deepseek", "deepseek ue8m0", "e8m0", "qwen3", "minimax", "ministral"])
def test_the_returned_weight_is_that_of_transformers(name: str) -> None:
    stored = store_layer(FORMATS[name], 256, 384)
    tensors = {key: [tensor] for key, tensor in stored.tensors.items() if key.startswith("weight")}
    tool = Fp8Dequantize(SimpleNamespace())
    [weight] = tool.convert(tensors).values()
    weight = weight[0] if isinstance(weight, list) else weight  # of transformers 5.17
    dtype = torch.bfloat16 if name in ("e8m0", "qwen3", "ministral") else torch.float32
    assert weight.dtype == dtype
    torch.testing.assert_close(weight, stored.weight.to(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["deepseek", "deepseek ue8m0", "e8m0", "qwen3", "minimax"])
def test_the_returned_weight_is_that_of_compressed_tensors(name: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer

    stored = store_layer(FORMATS[name], 576, 200)
    tensors = {f"layer.{key}": tensor for key, tensor in stored.tensors.items()}
    [weight] = FP8BlockDequantizer(dtype=torch.float32).process(tensors).values()
    torch.testing.assert_close(weight, stored.weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_has_the_tensors_of_the_format(name: str, llama: Path, tmp_path: Path) -> None:
    write_checkpoint(FORMATS[name], llama, tmp_path / "stored")
    assert layer_kinds(tmp_path / "stored", LAYER) == {"weight": WEIGHT, **SCALES[name]}
    assert json.loads((tmp_path / "stored/config.json").read_text())["quantization_config"] == FORMATS[name].settings


def test_listed_layers_stay_dense(llama: Path, tmp_path: Path) -> None:
    write_checkpoint(FORMATS["qwen3"], llama, tmp_path / "qwen3")
    write_checkpoint(FORMATS["fbgemm"], llama, tmp_path / "fbgemm")
    assert layer_kinds(tmp_path / "qwen3", "model.layers.1.mlp.down_proj") == {"weight": (torch.bfloat16, (256, 384))}
    assert layer_kinds(tmp_path / "fbgemm", "model.layers.0.self_attn.q_proj")["weight"][0] == torch.bfloat16
    assert layer_kinds(tmp_path / "fbgemm", "model.layers.1.self_attn.q_proj")["weight"][0] == torch.float8_e4m3fn


def test_names_are_read_as_transformers_reads_them() -> None:
    names = ["gate", "model.vision_tower", "model.layers.1.mlp", "lm_head"]
    layer = "model.layers.1"
    listed = {f"{layer}.block.gate", f"{layer}.block.shared_expert_gate", "model.vision_tower.blocks.0.fc", "lm_head"}
    listed |= {f"{layer}.mlp.up_proj"}
    for path in (*listed, f"{layer}0.mlp.up_proj", f"{layer}.self_attn.gate_proj"):
        assert is_listed(names, path) == (path in listed) == (not should_convert_module(path, names))
    assert not is_listed(names, "model.vision_tower_2.fc")  # transformers 5.17 takes it


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"fbgemm"}))
def test_transformers_accepts_the_settings(name: str) -> None:
    settings = FORMATS[name].settings
    assert settings is not None
    FineGrainedFP8Config.from_dict(dict(settings))


@pytest.mark.parametrize("name", ["deepseek", "e8m0", "qwen3", "minimax", "ministral"])
def test_the_weights_of_a_folder_are_those_that_transformers_loads(name: str, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' FP8 quantizer needs it")
    dense = write_checkpoint(FORMATS[name], llama, tmp_path / "stored")
    settings = FineGrainedFP8Config(dequantize=True)
    load = AutoModelForCausalLM.from_pretrained
    weights = load(tmp_path / "stored", dtype=torch.bfloat16, quantization_config=settings).state_dict()
    assert weights.keys() == dense.keys()
    for key, weight in dense.items():
        torch.testing.assert_close(weights[key].float(), weight, rtol=2**-8, atol=0)
