"""Weights as the libraries bitsandbytes and torchao store them.

bitsandbytes  4 bits: codes into a table, with the largest value of 64 consecutive ones, which may be quantised too
              (`nested`). `weight.quant_state.*` is JSON with the shape. 8 bits: int8 and `SCB` [n], 127 times the scale
torchao       `_weight_qdata`, `_weight_scale` and `_weight_zero_point` of a tensor subclass. The dtypes and shapes show
              which: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor [n, k] with scales [n, k / g], or Int4Tensor
              [n, k / 2] with scales and zero points [k / g, n]; its zero points are values of weights, not codes
"""

from __future__ import annotations

import json
from typing import Any

import torch

from tcdeploy.errors import ModelError
from tcdeploy.models.formats.quantised_weight import (
    FLOATS,
    HINT,
    Layer,
    QuantisedWeight,
    check_groups,
    converted,
    num_elements,
    weight_in_scheme,
)
from tcdeploy.models.weights.reader import read_tensor
from tcdeploy.models.weights.sources import Source

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
TORCHAO = ("_weight_qdata", "_weight_scale", "_weight_zero_point")


def find_bitsandbytes_weight(layer: Layer) -> QuantisedWeight | None:
    state = layer.find(*STATES)
    if state is not None:
        return _four_bit_weight(layer, state)
    if "SCB" not in layer.tensors:
        return None
    rows, columns = layer.require_matrix("weight", (torch.int8,)).shape
    layer.require("SCB", FLOATS, (rows,))
    scale = converted("divided", (rows, 1), [["reshape", [rows, 1], layer.source("SCB")]], 127)
    if "weight_format" in layer.tensors and read_tensor(layer.require("weight_format", (torch.uint8,))).any():
        raise layer.wrong("weight_format", "must be 0 (rows in order); other values are layouts for tensor cores")
    names = layer.names(("weight", "SCB", "weight_format"))
    return weight_in_scheme(layer, names, "int8", [layer.source("weight"), scale], (layer.name("SCB"),))


def _four_bit_weight(layer: Layer, state: str) -> QuantisedWeight:
    try:
        values: dict[str, Any] = json.loads(bytes(read_tensor(layer.require(state, (torch.uint8,))).tolist()))
        rows, columns = values["shape"]
        block, nested_block, offset = (
            values["blocksize"],
            values.get("nested_blocksize", 0),
            values.get("nested_offset", 0.0),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{layer.name(state)} of {layer.model} is damaged: {error}", HINT) from None
    is_nested = nested_block > 0
    blocks = -(-rows * columns // block)
    if num_elements(layer.require("weight", (torch.uint8,))) != -(-rows * columns // 2):
        raise layer.wrong("weight", f"must have the bytes of [{rows}, {columns}] values")
    layer.require("weight.absmax", (torch.uint8,) if is_nested else (torch.float32,), (blocks,))
    layer.require("weight.quant_map", (torch.float32,), (16,))
    parts = ["weight", "weight.quant_map", "weight.absmax"]
    if is_nested:
        layer.require(NESTED[0], (torch.float32,), (-(-blocks // nested_block),))
        layer.require(NESTED[1], (torch.float32,), (256,))
        parts += NESTED
    sources = [layer.source(part) for part in parts]
    dense = converted("table_values", (rows, columns), sources, rows, columns, block, nested_block, offset)
    scales = (layer.name(NESTED[0] if is_nested else "weight.absmax"),)
    reason = "4 bits of bitsandbytes have no kernel"
    return QuantisedWeight(layer.names((*parts, state)), (rows, columns), dense, reason=reason, scales=scales)


def find_torchao_weight(layer: Layer) -> QuantisedWeight | None:
    data, scale_name, zero_name = TORCHAO
    if data not in layer.tensors:
        return None
    stored = layer.require_matrix(data, (torch.float8_e4m3fn, torch.int8))
    names, scales = layer.names(TORCHAO), (layer.name(scale_name),)
    scale, rows = layer.require(scale_name, FLOATS), stored.shape[0]
    if stored.dtype == torch.float8_e4m3fn:
        is_single = num_elements(scale) == 1
        if not is_single:
            layer.require(scale_name, FLOATS, (rows, 1))
        by_row: Source = converted("repeated", (rows,), [layer.source(scale_name)], rows)
        by_row = by_row if is_single else ["reshape", [rows], layer.source(scale_name)]
        return weight_in_scheme(layer, names, "fp8_channel", [layer.source(data), by_row], scales)
    if len(scale.shape) == 2 and scale.shape[1] == rows != scale.shape[0] and zero_name in layer.tensors:
        layer.require(zero_name, FLOATS, scale.shape)
        columns = 2 * stored.shape[1]
        check_groups(layer, scale_name, columns, scale.shape[0])
        sources = [layer.source(data), layer.source(scale_name), layer.source(zero_name)]
        dense = converted("signed_nibbles_and_offsets", (rows, columns), sources)
        reason = "int4 of torchao has zero points in floating point, which have no kernel"
        return QuantisedWeight(names, (rows, columns), dense, reason=reason, scales=scales)
    columns = stored.shape[1]
    groups = layer.require(scale_name, FLOATS, (rows, *scale.shape[1:])).shape[-1]
    check_groups(layer, scale_name, columns, groups)
    sources = [layer.source(data), layer.source(scale_name)]
    if zero_name not in layer.tensors or not read_tensor(layer.tensors[zero_name]).any():
        return weight_in_scheme(layer, names, "int8", sources, scales)
    layer.require(zero_name, (torch.int8,), (rows, groups))
    dense = converted("grouped_values", (rows, columns), [*sources, layer.source(zero_name)])
    return QuantisedWeight(names, (rows, columns), dense, reason="int8 with zero points has no kernel", scales=scales)
