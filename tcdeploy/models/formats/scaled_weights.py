"""Weights of 8 bits with a scale for the whole matrix, for each row, or for each block of rows and columns.

The tensors say which of them: `weight` float8_e4m3fn or int8 [n, k], and one scale of these shapes, by which the values
are multiplied.

    [] or [1]                               the whole matrix
    [n] or [n, 1]                           a row
    [ceil(n / rows), ceil(k / columns)]     a block, of 128 x 128 unless the config says another size; Model Optimizer
                                            has dimensions of 1 between and after them
    [n, k / columns]                        a group of columns (MXFP8, whose scales are exponents in uint8)

The scale is `weight_scale_inv` in checkpoints of DeepSeek, Qwen3 and Ministral, although it is not inverted, and
`weight_scale` in those of compressed-tensors, FBGEMM and TensorRT Model Optimizer. Scales of inputs are not used:
inputs keep their 16 bits.
"""

from __future__ import annotations

import torch

from tcdeploy.models.formats.quantised_weight import (
    FLOATS,
    Layer,
    QuantisedWeight,
    converted,
    num_elements,
    weight_in_scheme,
)
from tcdeploy.models.weights.reader import StoredTensor
from tcdeploy.models.weights.sources import Source

SCALES = ("weight_scale_inv", "weight_scale")
UNUSED = ("input_scale", "activation_scale", "input_scale_ub", "output_scale", "input_zero_point", "weight_shape")
BLOCK = (128, 128)  # of the scheme fp8_block


def find_fp8_weight(layer: Layer, block: tuple[int, int] | None = None) -> QuantisedWeight | None:
    """block: rows and columns that share a scale, if the config states them. None if the weight has another dtype.

    Raises ModelError if there is no scale, or if it has an impossible shape.
    """
    weight = layer.tensors.get("weight")
    if weight is None or weight.dtype != torch.float8_e4m3fn:
        return None
    rows, columns = layer.require_matrix("weight", (torch.float8_e4m3fn,)).shape
    suffix = layer.find(*SCALES) or "weight_scale"
    scale = layer.require(suffix, (*FLOATS, torch.float8_e8m0fnu, torch.uint8))
    names = layer.names(("weight", suffix, *UNUSED))
    scales = (layer.name(suffix),) if scale.dtype != torch.uint8 else ()  # uint8: exponents, all of which are valid
    shape = tuple(scale.shape)
    by_block = layer.source(suffix)
    if scale.dtype == torch.uint8:
        by_block = ["view", "float8_e8m0fnu", [*shape], layer.name(suffix)]
    by_row = _source_by_row(by_block, weight, scale)
    if by_row is not None:
        return weight_in_scheme(layer, names, "fp8_channel", [layer.source("weight"), by_row], scales)
    if len(shape) == 4:
        shape = (shape[0], num_elements(scale) // shape[0])
        by_block = ["reshape", [*shape], by_block]
    if block is None:
        is_group = len(shape) == 2 and shape[0] == rows and shape[1] > 0
        block = (1, columns // shape[1]) if is_group else BLOCK
    if shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise layer.wrong(suffix, f"is no scale for blocks of {block[0]} x {block[1]} of a weight {[*weight.shape]}")
    if block == BLOCK:
        return weight_in_scheme(layer, names, "fp8_block", [layer.source("weight"), by_block], scales)
    dense = converted("scaled_in_blocks", weight.shape, [layer.source("weight"), by_block], *block)
    reason = f"FP8 with blocks of {block[0]} x {block[1]} has no kernel"
    return QuantisedWeight(names, weight.shape, dense, reason=reason, scales=scales)


def find_int8_weight(layer: Layer) -> QuantisedWeight | None:
    """A weight in int8 with a scale, and perhaps a zero point, per row or for all. None if it has another dtype."""
    weight = layer.tensors.get("weight")
    if weight is None or weight.dtype != torch.int8:
        return None
    rows, columns = layer.require_matrix("weight", (torch.int8,)).shape
    scale = layer.require("weight_scale", FLOATS)
    by_row = _source_by_row(layer.source("weight_scale"), weight, scale)
    if by_row is None:
        raise layer.wrong("weight_scale", f"must have the shape [], [{rows}] or [{rows}, 1]")
    names = layer.names(("weight", "weight_scale", "weight_zero_point", *UNUSED))
    scales = (layer.name("weight_scale"),)
    by_row = ["reshape", [rows, 1], by_row]
    if "weight_zero_point" not in layer.tensors:
        return weight_in_scheme(layer, names, "int8", [layer.source("weight"), by_row], scales)
    zeros = layer.require("weight_zero_point", (torch.int8,))
    by_row_zeros = _source_by_row(layer.source("weight_zero_point"), weight, zeros)
    if by_row_zeros is None:
        raise layer.wrong("weight_zero_point", f"must have the shape of the scale, {[*scale.shape]}")
    parts = [layer.source("weight"), by_row, ["reshape", [rows, 1], by_row_zeros]]
    dense = converted("grouped_values", (rows, columns), parts)
    return QuantisedWeight(names, (rows, columns), dense, reason="int8 with zero points has no kernel", scales=scales)


def _source_by_row(source: Source, weight: StoredTensor, values: StoredTensor) -> Source | None:
    """The source of one value for each row [n], from one value for all or for each; None for other shapes.

    source: of `values`.
    """
    rows = weight.shape[0]
    if num_elements(values) == 1 and len(values.shape) <= 2:
        return converted("repeated", (rows,), [source], rows)
    if values.shape in ((rows,), (rows, 1)):
        return ["reshape", [rows], source]
    return None
