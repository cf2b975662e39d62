"""Checkpoints of bitsandbytes hold the values that their writer returns: by the definition, and by the tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.formats.bitsandbytes import FORMATS, TABLES, nested_table, value_at
from tests.formats.checkpoint import random_weight, write_checkpoint
from tests.formats.layers import Kind, decode, layer_kinds, relative_error, store_layer

LAYER = "model.layers.1.self_attn.k_proj"  # [64, 256]
FOUR_BITS: dict[str, Kind] = {
    "weight": (torch.uint8, (8192, 1)), "weight.quant_map": (torch.float32, (16,)),
    "weight.absmax": (torch.float32, (256,)), "weight.quant_state.bitsandbytes__nf4": (torch.uint8, (79,)),
}  # fmt: skip
STORED: dict[str, dict[str, Kind]] = {
    "nf4": FOUR_BITS,
    "int8": {"weight": (torch.int8, (64, 256)), "SCB": (torch.float32, (64,)), "weight_format": (torch.uint8, ())},
}
NESTED: dict[str, Kind] = {
    "weight.absmax": (torch.uint8, (256,)), "weight.nested_absmax": (torch.float32, (1,)),
    "weight.nested_quant_map": (torch.float32, (256,)),
}  # fmt: skip
FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "nf4": ("weight", lambda codes: codes >> 4 | codes << 4),
    "nf4 nested": ("weight.nested_quant_map", lambda table: table.flip(0)),
    "fp4": ("weight.quant_map", lambda _: TABLES["nf4"]),
    "int8": ("SCB", lambda largest: largest.roll(1)),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [256, 72])
def test_the_returned_weight_is_the_stored_one_by_definition(name: str, columns: int) -> None:
    """Blocks of 64 values cross the ends of rows of 72."""
    stored = store_layer(FORMATS[name], 12, columns)
    weight = decode(value_at, stored.tensors, stored.weight.shape)
    torch.testing.assert_close(weight, stored.weight, rtol=1e-6, atol=1e-9)
    assert 0.001 < relative_error(stored.weight, random_weight(12, columns)) < (0.02 if name == "int8" else 0.2)


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_reading_changes_the_weight(name: str) -> None:
    stored, (suffix, change) = store_layer(FORMATS[name]), FAULTS[name]
    tensors = {**stored.tensors, suffix: change(stored.tensors[suffix])}
    assert relative_error(decode(value_at, tensors, stored.weight.shape), stored.weight) > 0.1


@pytest.mark.parametrize("name", ["nf4", "nf4 nested", "fp4"])
@pytest.mark.parametrize("columns", [256, 72])
def test_the_returned_weight_is_that_of_bitsandbytes(name: str, columns: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    stored = store_layer(FORMATS[name], 12, columns)
    parts = {key: item for key, item in stored.tensors.items() if key != "weight"}
    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    state.dtype = torch.float32
    weight = functional.dequantize_4bit(stored.tensors["weight"], state)
    torch.testing.assert_close(weight, stored.weight, rtol=1e-5, atol=1e-8)


def test_rows_of_int8_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    stored = store_layer(FORMATS["int8"])
    weight = functional.int8_vectorwise_dequant(stored.tensors["weight"], stored.tensors["SCB"])
    torch.testing.assert_close(weight, stored.weight, rtol=1e-5, atol=0)


def test_the_tables_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for kind, table in TABLES.items():
        assert torch.equal(table, functional.get_4bit_type(kind, device="cpu"))
    torch.testing.assert_close(nested_table(), functional.create_dynamic_map(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["nf4", "nf4 nested", "int8"])
def test_a_folder_has_the_tensors_of_the_format(name: str, llama: Path, tmp_path: Path) -> None:
    write_checkpoint(FORMATS[name], llama, tmp_path / "stored")
    kinds = layer_kinds(tmp_path / "stored", LAYER)
    if name != "nf4 nested":
        assert kinds == STORED[name]
        return
    state = "weight.quant_state.bitsandbytes__nf4"
    assert kinds == {**FOUR_BITS, **NESTED, state: kinds[state]}
    assert "weight" in layer_kinds(tmp_path / "stored", "model.layers.0.self_attn.q_proj")
