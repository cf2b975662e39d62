"""Checkpoints of torchao hold the values that their writer returns: by the definition, and by the tool."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.formats.checkpoint import WEIGHTS, random_weight, read_tensors, write_checkpoint
from tests.formats.layers import Kind, decode, layer_kinds, relative_error, store_layer
from tests.formats.torchao import FORMATS, value_at

LAYER = "model.layers.1.self_attn.k_proj"  # [64, 256]
STORED: dict[str, dict[str, Kind]] = {
    "int8": {
        "_weight_qdata": (torch.int8, (64, 256)), "_weight_scale": (torch.float32, (64, 1)),
        "_weight_zero_point": (torch.int8, (64, 1)),
    },
    "float8": {"_weight_qdata": (torch.float8_e4m3fn, (64, 256)), "_weight_scale": (torch.float32, (64, 1))},
    "intx": {
        "_weight_qdata": (torch.int8, (64, 256)), "_weight_scale": (torch.bfloat16, (64, 8)),
        "_weight_zero_point": (torch.int8, (64, 8)),
    },
    "int4": {
        "_weight_qdata": (torch.int8, (64, 128)), "_weight_scale": (torch.bfloat16, (2, 64)),
        "_weight_zero_point": (torch.bfloat16, (2, 64)),
    },
}  # fmt: skip
FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "int8": ("_weight_scale", lambda scale: scale.roll(1, 0)),
    "float8": ("_weight_scale", torch.reciprocal),
    "intx": ("_weight_zero_point", torch.zeros_like),
    "int4": ("_weight_zero_point", torch.zeros_like),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_returned_weight_is_the_stored_one_by_definition(name: str) -> None:
    stored = store_layer(FORMATS[name])
    weight = decode(value_at, stored.tensors, stored.weight.shape)
    torch.testing.assert_close(weight, stored.weight, rtol=1e-5, atol=1e-8)
    assert 0.001 < relative_error(stored.weight, random_weight(*stored.weight.shape)) < 0.15


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_reading_changes_the_weight(name: str) -> None:
    stored, (suffix, change) = store_layer(FORMATS[name]), FAULTS[name]
    tensors = {**stored.tensors, suffix: change(stored.tensors[suffix])}
    assert relative_error(decode(value_at, tensors, stored.weight.shape), stored.weight) > 0.1


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_has_the_tensors_and_the_header_of_the_format(name: str, llama: Path, tmp_path: Path) -> None:
    dense = write_checkpoint(FORMATS[name], llama, tmp_path / "stored")
    assert layer_kinds(tmp_path / "stored", LAYER) == STORED[name]
    with safe_open(tmp_path / "stored" / WEIGHTS, "pt") as file:
        header = file.metadata()
    assert json.loads(header["tensor_names"]) == list(dense)
    assert header["lm_head.weight"] == '{"_type": "Tensor"}'
    parts = json.loads(header[f"{LAYER}.weight"])["_tensor_data_names"]
    assert {f"_weight_{part}" for part in parts} == STORED[name].keys()


@pytest.mark.parametrize("name", ["int8", "float8", "intx"])
def test_the_weights_of_a_folder_are_those_of_torchao(name: str, llama: Path, tmp_path: Path) -> None:
    """Its reader rebuilds the subclasses from the header. They dequantise to bfloat16."""
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    dense = write_checkpoint(FORMATS[name], llama, tmp_path / "stored")
    with safe_open(tmp_path / "stored" / WEIGHTS, "pt") as file:
        tensors, rest = support.unflatten_tensor_state_dict(read_tensors(tmp_path / "stored"), file.metadata())
    assert not rest and tensors.keys() == dense.keys()
    for key, weight in dense.items():
        read = tensors[key]
        read = read.dequantize() if hasattr(read, "qdata") else read
        torch.testing.assert_close(read.float(), weight, rtol=2**-8, atol=0)


def test_torchao_rebuilds_int4_weights(llama: Path, tmp_path: Path) -> None:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    write_checkpoint(FORMATS["int4"], llama, tmp_path / "stored")
    with safe_open(tmp_path / "stored" / WEIGHTS, "pt") as file:
        tensors, _ = support.unflatten_tensor_state_dict(read_tensors(tmp_path / "stored"), file.metadata())
    weight = tensors[f"{LAYER}.weight"]
    assert type(weight).__name__ == "Int4Tensor" and weight.shape == (64, 256)
