"""Weights of 4-bit floating point (e2m1), two per byte, the even column in the lower half.

nvfp4    a float8_e4m3fn scale for 16 columns, and a float32 one for the matrix
         compressed-tensors: weight_packed, weight_scale, and weight_global_scale, which divides
         TensorRT Model Optimizer: weight, weight_scale, and weight_scale_2, which multiplies
mxfp4    a power of two (e8m0) for 32 columns
         compressed-tensors: weight_packed and weight_scale
         gpt-oss: experts, NAME_blocks [experts, n, k/32, 16] and NAME_scales [experts, n, k/32] for NAME
         [experts, k, n]
"""

from __future__ import annotations

import torch

from tcdeploy.models.formats.quantised_weight import Layer, QuantisedWeight, converted, num_elements, weight_in_scheme
from tcdeploy.models.weights.sources import Source, WeightSource

BLOCK = 32  # columns of MXFP4 that share a scale
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")  # of gpt-oss
UNUSED = ("input_scale", "input_global_scale", "output_scale", "weight_shape")


def find_nvfp4_weight(layer: Layer) -> QuantisedWeight | None:
    is_compressed = "weight_packed" in layer.tensors and "weight_global_scale" in layer.tensors
    suffix, factor = ("weight_packed", "weight_global_scale") if is_compressed else ("weight", "weight_scale_2")
    weight = layer.tensors.get(suffix)
    if weight is None or weight.dtype != torch.uint8 or not (is_compressed or factor in layer.tensors):
        return None
    rows = weight.shape[0]
    layer.require("weight_scale", (torch.float8_e4m3fn,))
    if num_elements(layer.require(factor, (torch.float32,))) != 1:
        raise layer.wrong(factor, "must have one value")
    by_row = converted("reciprocal" if is_compressed else "repeated", (rows,), [layer.source(factor)], rows)
    sources: list[Source] = [layer.source(suffix), layer.source("weight_scale"), by_row]
    names = layer.names((suffix, "weight_scale", factor, *UNUSED))
    return weight_in_scheme(layer, names, "nvfp4", sources, (layer.name("weight_scale"), layer.name(factor)))


def find_mxfp4_weight(layer: Layer) -> QuantisedWeight | None:
    weight = layer.tensors.get("weight_packed")
    if weight is None or weight.dtype != torch.uint8:
        return None
    scale = layer.require("weight_scale", (torch.uint8, torch.float8_e8m0fnu))
    in_bytes: Source = ["view", "uint8", [*scale.shape], layer.name("weight_scale")]
    names = layer.names(("weight_packed", "weight_scale", *UNUSED))
    return weight_in_scheme(layer, names, "mxfp4", [layer.source("weight_packed"), in_bytes], ())


def find_mxfp4_experts(layer: Layer) -> dict[str, QuantisedWeight]:
    """The weights of experts of gpt-oss in a layer, by suffix. Raises ModelError for blocks that do not fit scales."""
    weights: dict[str, QuantisedWeight] = {}
    for suffix in EXPERT_WEIGHTS:
        blocks, scales = f"{suffix}_blocks", f"{suffix}_scales"
        if blocks not in layer.tensors and scales not in layer.tensors:
            continue
        stored = layer.require(scales, (torch.uint8, torch.float8_e8m0fnu))
        if len(stored.shape) != 3:
            raise layer.wrong(scales, "must be [experts, rows, groups]")
        layer.require(blocks, (torch.uint8,), (*stored.shape, BLOCK // 2))
        experts, rows, groups = stored.shape
        in_bytes: Source = ["view", "uint8", [*stored.shape], layer.name(scales)]
        by_expert = [  # one at a time, because 128 of them would take gigabytes of host memory in each thread
            converted(
                "mxfp4_experts", (1, groups * BLOCK, rows),
                [["slice", 0, number, number + 1, layer.source(blocks)], ["slice", 0, number, number + 1, in_bytes]],
            )
            for number in range(experts)
        ]  # fmt: skip
        packed_shape = (experts, rows, groups * BLOCK // 2)
        tensors = (
            WeightSource("uint8", packed_shape, ["reshape", [*packed_shape], layer.source(blocks)]),
            WeightSource("uint8", (experts, rows, groups), in_bytes),
        )
        shape = (experts, groups * BLOCK, rows)
        weights[suffix] = QuantisedWeight(layer.names((blocks, scales)), shape, ["cat", 0, by_expert], "mxfp4", tensors)
    return weights
