"""Checkpoints of TensorRT Model Optimizer hold the values that their writer returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.formats.checkpoint import random_weight, read_tensors, write_checkpoint
from tests.formats.layers import Kind, decode, layer_kinds, relative_error, store_layer
from tests.formats.modelopt import FORMATS, SIDECAR, WILDCARDS, algorithm_of, value_at

LAYER = "model.layers.1.self_attn.k_proj"
FP8: Kind = (torch.float8_e4m3fn, (64, 256))
NUMBER: Kind = (torch.float32, ())
NVFP4: dict[str, Kind] = {
    "weight": (torch.uint8, (64, 128)), "weight_scale": (torch.float8_e4m3fn, (64, 16)), "weight_scale_2": NUMBER,
}  # fmt: skip
STORED: dict[str, dict[str, Kind]] = {
    "fp8": {"weight": FP8, "weight_scale": NUMBER, "input_scale": NUMBER, "k_scale": NUMBER},
    "fp8 sidecar only": {"weight": FP8, "weight_scale": NUMBER, "input_scale": NUMBER},
    "fp8 config only": {"weight": FP8, "weight_scale": NUMBER, "input_scale": NUMBER},
    "fp8 per channel": {"weight": FP8, "weight_scale": (torch.float32, (64,))},
    "fp8 blocks": {"weight": FP8, "weight_scale": (torch.float32, (1, 1, 2, 1))},
    "nvfp4": {**NVFP4, "input_scale": NUMBER, "k_scale": NUMBER},
    "nvfp4 sidecar only": {**NVFP4, "input_scale": NUMBER},
    "nvfp4 weights only": NVFP4,
    "mixed": {"weight": FP8, "weight_scale": NUMBER, "input_scale": NUMBER},
}
FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "fp8": ("weight_scale", torch.reciprocal),
    "fp8 per channel": ("weight_scale", lambda scale: scale.roll(1)),
    "fp8 blocks": ("weight_scale", lambda scale: scale.flip(2)),
    "nvfp4": ("weight_scale_2", torch.reciprocal),
    "nvfp4 weights only": ("weight", lambda codes: codes >> 4 | codes << 4),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_returned_weight_is_the_stored_one_by_definition(name: str) -> None:
    stored = store_layer(FORMATS[name])
    shape = stored.weight.shape
    torch.testing.assert_close(decode(value_at, stored.tensors, shape), stored.weight, rtol=1e-6, atol=0)
    limit = 0.15 if stored.tensors["weight"].dtype == torch.uint8 else 0.04
    assert 0.01 < relative_error(stored.weight, random_weight(*shape)) < limit


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_reading_changes_the_weight(name: str) -> None:
    stored = store_layer(FORMATS[name])
    suffix, change = FAULTS[name]
    tensors = {**stored.tensors, suffix: change(stored.tensors[suffix])}
    assert relative_error(decode(value_at, tensors, stored.weight.shape), stored.weight) > 0.1


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 weights only"])
def test_the_returned_weight_is_that_of_compressed_tensors(name: str) -> None:
    """The tool renames and inverts, then reads its own format, whose weights it rounds to bfloat16."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4

    stored = store_layer(FORMATS[name])
    tensors = ModelOptNvfp4Converter().process({f"layer.{key}": item for key, item in stored.tensors.items()})
    tensors = {key.removeprefix("layer."): item for key, item in tensors.items()}
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
    result = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").decompress(tensors, scheme)["weight"]
    torch.testing.assert_close(result.float(), stored.weight, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_has_the_tensors_of_the_format(name: str, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    write_checkpoint(FORMATS[name], llama, folder)
    assert layer_kinds(folder, LAYER) == STORED[name]
    config = json.loads((folder / "config.json").read_text())
    assert ("quantization_config" in config) == (name not in ("fp8 sidecar only", "nvfp4 sidecar only"))
    assert (folder / SIDECAR).exists() == (name != "fp8 config only")


def test_wildcards_exclude_layers(llama: Path, tmp_path: Path) -> None:
    write_checkpoint(FORMATS["nvfp4 sidecar only"], llama, tmp_path / "stored")
    names = read_tensors(tmp_path / "stored")
    dense = {name.rpartition(".")[0] for name in names if name.endswith("proj.weight")} - {
        name.rpartition(".")[0] for name in names if name.endswith("weight_scale_2")
    }
    attention = {f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"}
    assert dense == attention | {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    assert (
        algorithm_of({"exclude_modules": WILDCARDS, "quant_algo": "FP8"}, "model.layers.10.self_attn.q_proj") == "FP8"
    )


def test_mixed_layers_have_the_algorithm_of_their_path_or_of_a_parent(llama: Path, tmp_path: Path) -> None:
    write_checkpoint(FORMATS["mixed"], llama, tmp_path / "stored")
    paths = ("0.self_attn.q_proj", "1.mlp.gate_proj", "0.self_attn.o_proj", "1.self_attn.o_proj")
    kinds = [layer_kinds(tmp_path / "stored", f"model.layers.{path}") for path in paths]
    assert [kind["weight"][0] for kind in kinds] == [
        torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.uint8,
    ]  # fmt: skip
    assert ["input_scale" in kind for kind in kinds] == [True, False, False, True]


def test_the_settings_of_config_json_repeat_those_of_the_file_beside_it() -> None:
    form = FORMATS["mixed"]
    assert form.settings is not None
    assert form.settings["ignore"] == form.files[SIDECAR]["quantization"]["exclude_modules"]
    groups = form.settings["config_groups"].values()
    targets = sorted(target for group in groups for target in group["targets"])
    assert targets == sorted(form.files[SIDECAR]["quantization"]["quantized_layers"])
