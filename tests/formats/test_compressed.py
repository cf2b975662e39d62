"""Every compressed-tensors checkpoint holds the values that its writer returns: by the definition, and by the tool."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.formats.checkpoint import WEIGHTS, StoredWeight, random_weight, read_tensors, write_checkpoint
from tests.formats.compressed import FORMATS, config, group_of, store, value_at
from tests.formats.experts import CASES
from tests.formats.layers import Kind, decode, layer_kinds, relative_error

ROWS, COLUMNS = 12, 256
# The largest error, relative to the largest weight of a group or of what else shares a scale.
ERRORS = {"float": 0.04, "int8": 0.01, "int4": 0.12, "nvfp4": 0.2, "mxfp4": 0.34, "mxfp8": 0.13, "mixed": 0.12}
FAULTS: dict[str, tuple[str, Any]] = {
    "float channel": ("weight_scale", lambda scale: scale.flip(0)),
    "float tensor": ("weight_scale", torch.ones_like),
    "float block": ("weight_scale", lambda scale: scale.flip(1)),
    "int8": ("weight_scale", lambda scale: scale.roll(1, 0)),
    "int8 asymmetric": ("weight_zero_point", lambda zeros: zeros.roll(1, 0)),
    "int4 group 128": ("weight_scale", lambda scale: scale.flip(1)),
    "int4 group 32": ("weight_packed", lambda words: words.view(torch.uint8).flip(1).view(torch.int32)),
    "int4 asymmetric": ("weight_zero_point", lambda words: words + 0x11111111),
    "int4 g_idx": ("weight_g_idx", lambda groups: groups.sort().values),
    "int4 asymmetric g_idx": ("weight_g_idx", lambda groups: groups.sort().values),
    "nvfp4": ("weight_packed", lambda codes: codes >> 4 | codes << 4),
    "nvfp4 weights only": ("weight_global_scale", lambda divisor: 1 / divisor),
    "mxfp4": ("weight_scale", lambda scale: scale + 1),
    "mxfp8": ("weight_scale", lambda scale: scale.flip(1)),
}


def stored_weight(name: str, weight: Tensor) -> tuple[str, dict[str, Any], StoredWeight]:
    """The format, the arguments of the weights, and the weight as it is stored for a query projection."""
    form, path = FORMATS[name], "model.layers.0.self_attn.q_proj"
    group = group_of(form.settings, path)
    stored = form.store(f"{path}.weight", weight)
    tensors = {key.removeprefix(f"{path}."): tensor for key, tensor in stored.tensors.items()}
    return group.get("format", form.settings["format"]), group["weights"], StoredWeight(tensors, *stored.dense.values())


@pytest.mark.parametrize("name", FORMATS)
def test_the_returned_weight_is_the_stored_one_by_definition(name: str) -> None:
    weight = random_weight(ROWS, COLUMNS)
    form, weights, stored = stored_weight(name, weight)
    torch.testing.assert_close(
        decode(partial(value_at, form, weights), stored.tensors, weight.shape), stored.weight, rtol=1e-6, atol=0
    )
    error = (stored.weight - weight).abs().amax() / weight.abs().amax()
    assert 0 < error < ERRORS[name.split()[0]]


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_reading_changes_the_weight(name: str) -> None:
    weight = random_weight(ROWS, COLUMNS)
    form, weights, stored = stored_weight(name, weight)
    suffix, change = FAULTS[name]
    tensors = {**stored.tensors, suffix: change(stored.tensors[suffix])}
    assert relative_error(decode(partial(value_at, form, weights), tensors, weight.shape), stored.weight) > 0.04


@pytest.mark.parametrize("name", FORMATS)
def test_the_returned_weight_is_that_of_compressed_tensors(name: str) -> None:
    """Scales are given in float32, as the tool multiplies in their dtype. It rounds FP4 weights to bfloat16."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    form, weights, stored = stored_weight(name, random_weight(ROWS, COLUMNS))
    if weights["actorder"] == "group":
        pytest.skip("releases since 0.13 do not read weight_g_idx")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors = dict(stored.tensors)
    if tensors["weight_scale"].dtype == torch.bfloat16:
        tensors["weight_scale"] = tensors["weight_scale"].float()
    result = BaseCompressor.get_value_from_registry(form).decompress(tensors, scheme)["weight"]
    torch.testing.assert_close(result, stored.weight.to(result.dtype), rtol=1e-6, atol=0)


def test_blocks_at_the_edges_are_smaller() -> None:
    weight = random_weight(136, 200)
    form, weights, stored = stored_weight("float block", weight)
    assert stored.tensors["weight_scale"].shape == (2, 2)
    for row, column in ((0, 0), (127, 127), (128, 127), (127, 128), (135, 199)):
        assert value_at(form, weights, stored.tensors, row, column) == stored.weight[row, column]


@pytest.mark.parametrize("name", FORMATS)
def test_the_settings_are_those_of_compressed_tensors(name: str) -> None:
    """And the tool chooses the same layers."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    settings = json.loads(json.dumps(FORMATS[name].settings))
    for group in settings["config_groups"].values():
        if group["weights"]["actorder"] == "group":
            group["weights"]["actorder"] = None
    parsed = QuantizationConfig.model_validate(settings)
    for layer in range(2):
        for path in (f"model.layers.{layer}.self_attn.o_proj", f"model.layers.{layer}.mlp.down_proj", "lm_head"):
            is_ignored = any(match_name(path, pattern) for pattern in parsed.ignore)
            assert is_ignored == (group_of(FORMATS[name].settings, path) is None)


LAYER = "model.layers.0.self_attn.k_proj"  # [64, 256]
STORED: dict[str, dict[str, Kind]] = {
    "float channel": {"weight": (torch.float8_e4m3fn, (64, 256)), "weight_scale": (torch.bfloat16, (64, 1))},
    "float tensor": {
        "weight": (torch.float8_e4m3fn, (64, 256)), "weight_scale": (torch.bfloat16, (1,)),
        "input_scale": (torch.bfloat16, (1,)),
    },
    "float scalar": {
        "weight": (torch.float8_e4m3fn, (64, 256)), "weight_scale": (torch.bfloat16, ()),
        "input_scale": (torch.bfloat16, (1,)),
    },
    "float block": {"weight": (torch.float8_e4m3fn, (64, 256)), "weight_scale": (torch.bfloat16, (1, 2))},
    "int8 asymmetric": {
        "weight": (torch.int8, (64, 256)), "weight_scale": (torch.bfloat16, (64, 1)),
        "weight_zero_point": (torch.int8, (64, 1)),
    },
    "int4 asymmetric g_idx": {
        "weight_packed": (torch.int32, (64, 32)), "weight_scale": (torch.bfloat16, (64, 2)),
        "weight_shape": (torch.int64, (2,)), "weight_zero_point": (torch.int32, (8, 2)),
        "weight_g_idx": (torch.int32, (256,)),
    },
    "int8 packed channel": {
        "weight_packed": (torch.int32, (64, 64)), "weight_scale": (torch.bfloat16, (64, 1)),
        "weight_shape": (torch.int64, (2,)),
    },
    "nvfp4": {
        "weight_packed": (torch.uint8, (64, 128)), "weight_scale": (torch.float8_e4m3fn, (64, 16)),
        "weight_global_scale": (torch.float32, (1,)), "input_global_scale": (torch.float32, (1,)),
    },
    "mxfp4": {"weight_packed": (torch.uint8, (64, 128)), "weight_scale": (torch.uint8, (64, 8))},
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_a_folder_has_the_tensors_of_the_format(name: str, llama: Path, tmp_path: Path) -> None:
    dense = write_checkpoint(FORMATS[name], llama, tmp_path / "stored")
    assert layer_kinds(tmp_path / "stored", LAYER) == STORED[name]
    assert dense.keys() == load_file(llama / WEIGHTS).keys()
    assert all(item.dtype == torch.float32 for item in dense.values())
    settings = json.loads((tmp_path / "stored" / "config.json").read_text())["quantization_config"]
    assert settings == FORMATS[name].settings


EXPERT_CASES = ("int4", "nvfp4", "mxfp4 experts only")


@pytest.mark.parametrize("name", [*(name for name in FORMATS if "g_idx" not in name), *EXPERT_CASES])
def test_the_weights_of_a_folder_are_those_of_compressed_tensors(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """The tool finds the layers by the settings. It multiplies in the dtype of scales, and rounds to bfloat16.

    It does not know classes: embeddings would be targets too.
    """
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    family, form = CASES[name] if name in EXPERT_CASES else ("llama", FORMATS[name])
    dense = write_checkpoint(form, sources[family], tmp_path / "stored")
    tool = converters.CompressedTensorsDequantizer(str(tmp_path / "stored"), ["model.embed_tokens"])
    tensors = tool.process(read_tensors(tmp_path / "stored"))
    for key, weight in dense.items():
        torch.testing.assert_close(tensors.pop(key).float(), weight, rtol=2**-7, atol=0)
    assert {key.rpartition(".")[2] for key in tensors} <= {"input_scale", "input_global_scale"}


def test_ignored_layers_stay_dense_and_groups_differ(llama: Path, tmp_path: Path) -> None:
    write_checkpoint(FORMATS["mixed"], llama, tmp_path / "stored")
    tensors = load_file(tmp_path / "stored" / WEIGHTS)
    dtypes = {name: tensors[f"model.layers.{name}.weight"].dtype for name in ("0.self_attn.o_proj", "1.mlp.down_proj")}
    assert set(dtypes.values()) == {torch.bfloat16}
    assert tensors["model.layers.1.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn
    assert "model.layers.0.mlp.down_proj.weight_packed" in tensors


def test_scales_of_the_kv_cache_belong_to_the_attention_module(llama: Path, tmp_path: Path) -> None:
    write_checkpoint(FORMATS["float and kv"], llama, tmp_path / "stored")
    scales = {name: item for name, item in load_file(tmp_path / "stored" / WEIGHTS).items() if name.endswith("v_scale")}
    assert list(scales) == ["model.layers.0.self_attn.v_scale", "model.layers.1.self_attn.v_scale"]
    assert len({item.item() for item in scales.values()}) == 2


def test_an_exact_target_wins_over_an_expression_and_that_over_a_class() -> None:
    groups = [{"targets": targets, "weights": {}} for targets in (["Linear"], ["re:.*q_proj"], ["a.q_proj"])]
    settings = config("float-quantized", *groups, ignore=["re:.*up"])
    paths = ("a.up_proj", "b.k_proj", "b.q_proj", "b.lm_head")
    assert [group_of(settings, path) for path in paths] == [None, groups[0], groups[1], groups[0]]
    assert store(settings, {}, "a.up_proj", torch.ones(1, 1)) is None
