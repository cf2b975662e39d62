"""Checkpoints of GPTQ, AWQ and AutoRound hold the values that their writer returns: by definition, and by the tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.formats.checkpoint import random_weight, write_checkpoint
from tests.formats.int_packed import FORMATS, auto_round_settings, gptq_settings, store_awq, store_gptq, value_at
from tests.formats.layers import PATH, Kind, decode, layer_kinds, relative_error, store_layer

ROWS, COLUMNS = 32, 256  # words of 3 bits need 32 outputs
ERRORS = {2: 0.6, 3: 0.3, 4: 0.15, 8: 0.01}


def layer_settings(name: str) -> Mapping[str, Any]:
    settings = FORMATS[name].settings
    assert settings is not None
    rules = {"gptq": gptq_settings, "auto-round": auto_round_settings}
    changed = rules[settings["quant_method"]](settings, PATH) if settings["quant_method"] in rules else settings
    assert changed is not None
    return changed


@pytest.mark.parametrize("name", FORMATS)
def test_the_returned_weight_is_the_stored_one_by_definition(name: str) -> None:
    stored, settings = store_layer(FORMATS[name], ROWS, COLUMNS), layer_settings(name)
    weight = decode(partial(value_at, settings), stored.tensors, stored.weight.shape)
    torch.testing.assert_close(weight, stored.weight, rtol=1e-6, atol=0)
    assert 0.001 < relative_error(stored.weight, random_weight(ROWS, COLUMNS)) < ERRORS[settings["bits"]]


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "gptq": ("qzeros", lambda words: words + 0x11111111),
    "gptq act order": ("g_idx", lambda groups: groups.sort().values),
    "gptq asymmetric act order": ("scales", lambda scales: scales.flip(0)),
    "gptq 8 asymmetric": ("qzeros", lambda words: words.view(torch.uint8).flip(1).view(torch.int32)),
    "gptq 3": ("qweight", lambda words: words.flip(0)),
    "gptq v2 asymmetric": ("scales", torch.ones_like),
    "awq": ("qweight", lambda words: words.view(torch.uint8).flip(1).view(torch.int32)),
    "awq group 32": ("qzeros", lambda words: words + 0x11111111),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_reading_changes_the_weight(name: str) -> None:
    stored, (suffix, change) = store_layer(FORMATS[name], ROWS, COLUMNS), FAULTS[name]
    tensors = {**stored.tensors, suffix: change(stored.tensors[suffix])}
    weight = decode(partial(value_at, layer_settings(name)), tensors, stored.weight.shape)
    assert relative_error(weight, stored.weight) > 0.1


def test_the_other_version_of_zeros_changes_the_weight() -> None:
    stored, settings = store_layer(FORMATS["gptq"], ROWS, COLUMNS), layer_settings("gptq")
    assert set(stored.tensors["qzeros"].flatten().tolist()) == {0x77777777}
    wrong = {**settings, "checkpoint_format": "gptq_v2"}
    assert relative_error(decode(partial(value_at, wrong), stored.tensors, stored.weight.shape), stored.weight) > 0.1


def test_codes_in_the_order_of_outputs_are_not_those_of_awq() -> None:
    stored, settings = store_layer(FORMATS["awq"], ROWS, COLUMNS), layer_settings("awq")
    weight = decode(partial(value_at, settings), stored.tensors, stored.weight.shape)
    order = [row - row % 8 + (0, 2, 4, 6, 1, 3, 5, 7)[row % 8] for row in range(ROWS)]
    assert relative_error(weight[order], stored.weight) > 0.1


@pytest.mark.parametrize("name", [name for name in FORMATS if "awq" not in name])
def test_the_returned_weight_is_that_of_auto_round(name: str) -> None:
    """Its layer multiplies inputs; those of an identity give the weight. It reads GPTQ too."""
    pytest.importorskip("auto_round_extension")
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    stored, settings = store_layer(FORMATS[name], ROWS, COLUMNS), layer_settings(name)
    is_exact = settings.get("checkpoint_format") == "gptq_v2" or settings.get("packing_format") in (
        "auto_round", "auto_round:gptqmodel",
    )  # fmt: skip
    layer_class = (qlinear_torch if is_exact else qlinear_torch_zp).QuantLinear
    tensors = {key: item for key, item in stored.tensors.items() if key != "bias"}
    size = COLUMNS if settings["group_size"] == -1 else settings["group_size"]
    layer = layer_class(settings["bits"], size, COLUMNS, ROWS, False, g_idx="g_idx" in tensors)
    layer.load_state_dict({**tensors, "scales": tensors["scales"].half()})
    layer.scales = layer.scales.float()
    layer.dequant_dtype = torch.int16
    torch.testing.assert_close(layer(torch.eye(COLUMNS)).T, stored.weight, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in FORMATS if "awq" in name])
def test_the_returned_weight_is_that_of_two_readers_of_awq(name: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    stored, settings = store_layer(FORMATS[name], ROWS, COLUMNS), layer_settings(name)
    tensors = {f"layer.{key}": item for key, item in stored.tensors.items()}
    tensors["layer.scales"] = tensors["layer.scales"].float()
    size = settings["group_size"]
    converter = AutoAWQConverter.from_autoawq_config({"bits": 4, "group_size": size, "zero_point": True})
    tensors = {key.removeprefix("layer."): item for key, item in converter.process(tensors).items()}
    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=size, symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    result = BaseCompressor.get_value_from_registry("pack-quantized").decompress(tensors, scheme)["weight"]
    torch.testing.assert_close(result, stored.weight, rtol=1e-6, atol=0)
    pytest.importorskip("auto_round")
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    packed = stored.tensors
    result = dequantize_gemm(packed["qweight"], packed["qzeros"], packed["scales"].float(), 4, size)
    torch.testing.assert_close(result.T, stored.weight, rtol=1e-6, atol=0)


LAYER = "model.layers.1.self_attn.k_proj"  # [64, 256]
GPTQ: dict[str, Kind] = {
    "qweight": (torch.int32, (32, 64)), "qzeros": (torch.int32, (2, 8)), "scales": (torch.float16, (2, 64)),
    "g_idx": (torch.int32, (256,)),
}  # fmt: skip
STORED: dict[str, dict[str, Kind]] = {
    "gptq": GPTQ,
    "gptq with bias": {**GPTQ, "bias": (torch.float16, (64,))},
    "gptq one group": {**GPTQ, "qzeros": (torch.int32, (1, 8)), "scales": (torch.float16, (1, 64))},
    "gptq 8": {**GPTQ, "qweight": (torch.int32, (64, 64)), "qzeros": (torch.int32, (2, 16))},
    "gptq 3": {**GPTQ, "qweight": (torch.int32, (24, 64)), "qzeros": (torch.int32, (2, 6))},
    "awq": {
        "qweight": (torch.int32, (256, 8)), "qzeros": (torch.int32, (2, 8)), "scales": (torch.float16, (2, 64)),
    },
    "auto-round": {
        "qweight": (torch.int32, (32, 64)), "qzeros": (torch.int32, (8, 8)), "scales": (torch.float16, (8, 64)),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_a_folder_has_the_tensors_of_the_format(name: str, llama: Path, tmp_path: Path) -> None:
    write_checkpoint(FORMATS[name], llama, tmp_path / "stored")
    assert layer_kinds(tmp_path / "stored", LAYER) == STORED[name]
    assert json.loads((tmp_path / "stored/config.json").read_text())["quantization_config"] == FORMATS[name].settings


def test_layers_have_their_own_bits_and_groups(llama: Path, tmp_path: Path) -> None:
    """`dynamic`: the first expression that matches. `extra_config`: a path before an expression."""
    for name in ("gptq dynamic", "auto-round"):
        write_checkpoint(FORMATS[name], llama, tmp_path / name)
    layers = {
        ("gptq dynamic", "0.self_attn.o_proj"): {"weight": (256, 256)},
        ("gptq dynamic", "1.mlp.down_proj"): {"qweight": (96, 256), "scales": (6, 256)},
        ("gptq dynamic", "1.mlp.up_proj"): {"qweight": (32, 384), "scales": (8, 384)},
        ("gptq dynamic", "0.mlp.up_proj"): {"qweight": (32, 384), "scales": (2, 384)},
        ("auto-round", "0.mlp.down_proj"): {"weight": (256, 384)},
        ("auto-round", "1.self_attn.q_proj"): {"qweight": (64, 256), "scales": (2, 256)},
        ("auto-round", "1.self_attn.k_proj"): {"qweight": (32, 64), "scales": (8, 64)},
    }
    for (name, path), expected in layers.items():
        kinds = layer_kinds(tmp_path / name, f"model.layers.{path}")
        assert {key: kind[1] for key, kind in kinds.items() if key in ("weight", "qweight", "scales")} == expected


def test_parts_of_paths_stay_dense_in_awq(llama: Path, tmp_path: Path) -> None:
    write_checkpoint(FORMATS["awq group 32"], llama, tmp_path / "stored")
    assert "weight" in layer_kinds(tmp_path / "stored", "model.layers.1.mlp.up_proj")
    assert "qweight" in layer_kinds(tmp_path / "stored", "model.layers.0.self_attn.q_proj")


def test_a_word_of_gptq_holds_eight_inputs_in_order() -> None:
    weight = torch.zeros(32, 128)
    weight[:, 8], weight[3, :8] = 15, torch.arange(8)
    for offset, zeros in ((0, 0), (1, 0)):
        stored = store_gptq({"bits": 4, "group_size": 128, "sym": False}, offset, True, weight)
        first = stored.tensors["qweight"][0, 3].item()
        assert first == (0x76543210 if offset == 0 else 0x87654321 - 2**32)
        assert set(stored.tensors["qzeros"].flatten().tolist()) == {zeros}


def test_a_word_of_awq_holds_eight_outputs_with_even_ones_first() -> None:
    weight = torch.zeros(8, 128)
    weight[:, 1], weight[:, 0] = 15, torch.arange(8)
    stored = store_awq({"bits": 4, "group_size": 128, "sym": False}, weight)
    assert stored.tensors["qweight"][0, 0].item() == 0x75316420
    assert stored.tensors["qzeros"].tolist() == [[0]]
    assert torch.equal(stored.weight, weight)
