"""torchao's tensor subclasses as transformers saves them: flat tensors, and JSON in the header of the safetensors file.

config.json: `quant_method` "torchao", `quant_type` {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2,
"_data": {...}}}, `modules_to_not_convert`, `include_input_output_embeddings` (false: embeddings and lm_head are dense).
A config of FqnToConfig gives layers their own. What a file holds is best read from its header, not from quant_type.

The weight of a layer, model.layers.0.mlp.up_proj.weight, is a tensor for each part: model.layers.0.mlp.up_proj.
_weight_qdata, ._weight_scale, ._weight_zero_point. There is no tensor of the name "weight". The header has the keys
"tensor_names" (JSON list of dense names), and each dense name: {"_type": "Int8Tensor", "_data": {"block_size": [1, k],
"dtype": ..., ...}, "_tensor_data_names": ["zero_point", "qdata", "scale"]}, or {"_type": "Tensor"} for a dense one.
A file without the header cannot be read by torchao.

For a weight [n, k]:

- Int8Tensor (Int8WeightOnly, Int8DynamicActivationInt8Weight): qdata I8 [n, k], scale F32 [n, 1], zero_point I8 [n, 1]
  of zeros: value = qdata * scale.
- Float8Tensor: qdata F8_E4M3 [n, k], scale F32 [n, 1] (per row) or [1, 1] (per tensor); no zero point.
- IntxUnpackedToInt8Tensor (IntxWeightOnly, Int8DynamicActivationIntxWeight): qdata I8 [n, k] in -8..7 for int4, scale
  BF16 [n, k / g], zero_point I8 [n, k / g]: value = (qdata - zero_point) * scale.
- Int4Tensor (Int4WeightOnly, "plain"): qdata I8 [n, k / 2], two's complement in nibbles, the first column in the low
  one; scale and zero_point BF16 [k / g, n], TRANSPOSED. The zero point is a value of weights, not a code:
  value = code * scale + zero_point, code in -8..7.

Established by saving with transformers 5.23 and torchao 0.18 on the CPU (all but Int4Tensor, which quantises with mslk
on a GPU only: its layout is from torchao's int4_tensor.py and FBGEMM's int4_row_quantize_zp; torchao has no function
that dequantises it). Not covered: "preshuffled" and "tile_packed_to_4d", with bytes in the order of one GPU kernel.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.formats.checkpoint import Format, StoredWeight, store_projections
from tests.formats.fp8 import is_listed
from tests.formats.number_formats import e4m3, pack_fp4, to_fp8_blocks, to_integers

GROUP = 32
INT4_GROUP = 128
DTYPE = {"_type": "torch.dtype", "_data": "bfloat16"}
TENSOR_TYPES = {
    "Int8WeightOnlyConfig": "Int8Tensor", "Float8WeightOnlyConfig": "Float8Tensor",
    "IntxWeightOnlyConfig": "IntxUnpackedToInt8Tensor", "Int4WeightOnlyConfig": "Int4Tensor",
}  # fmt: skip
PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
CONFIGS: dict[str, dict[str, Any]] = {
    "Int8WeightOnlyConfig": {"granularity": PER_ROW, "group_size": None, "set_inductor_config": True},
    "Float8WeightOnlyConfig": {
        "granularity": PER_ROW, "set_inductor_config": True,
        "weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"},
    },
    "IntxWeightOnlyConfig": {
        "granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": GROUP}},
        "intx_choose_qparams_algorithm": {"_type": "IntxChooseQParamsAlgorithm", "_data": "AFFINE"},
        "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
        "mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"}, "scale_dtype": None,
        "weight_dtype": {"_type": "torch.dtype", "_data": "int4"},
    },
    "Int4WeightOnlyConfig": {"group_size": INT4_GROUP, "set_inductor_config": True},
}  # fmt: skip


def attributes(tensor_type: str, shape: Iterable[int]) -> dict[str, Any]:
    """What the header states besides the tensors."""
    rows, columns = shape
    if tensor_type == "Int4Tensor":
        return {"block_size": [1, INT4_GROUP], "shape": [rows, columns], "activation_dtype": DTYPE}
    if tensor_type == "IntxUnpackedToInt8Tensor":
        kind = {"_type": "torch.dtype", "_data": "int4"}
        return {"target_dtype": kind, "block_size": [1, GROUP], "dtype": DTYPE, "activation_quantization": None}
    if tensor_type == "Int8Tensor":
        return {"act_quant_kwargs": None, "reduce_range": False, "block_size": [1, columns], "dtype": DTYPE}
    preference = {"_type": "KernelPreference", "_data": "AUTO"}
    return {
        "block_size": [1, columns], "mm_config": None, "act_quant_kwargs": None, "kernel_preference": preference,
        "dtype": DTYPE,
    }  # fmt: skip


def quantise(tensor_type: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of the subclass in the order of `_tensor_data_names`, and the weight."""
    if tensor_type == "Float8Tensor":
        stored = to_fp8_blocks(weight, 1, weight.shape[1], torch.clone)
        return {"qdata": stored.codes, "scale": stored.scale}, stored.weight
    if tensor_type == "Int8Tensor":
        integers = to_integers(weight, 8, -1, True, torch.float32)
        zeros = torch.zeros(len(weight), 1, dtype=torch.int8)
        codes = (integers.codes - 128).to(torch.int8)
        return {"zero_point": zeros, "qdata": codes, "scale": integers.scales}, integers.weight
    if tensor_type == "IntxUnpackedToInt8Tensor":
        integers = to_integers(weight, 4, GROUP, False, torch.bfloat16)
        codes, zeros = ((item - 8).to(torch.int8) for item in (integers.codes, integers.zeros))
        return {"qdata": codes, "scale": integers.scales, "zero_point": zeros}, integers.weight
    parts = weight.unflatten(1, (-1, INT4_GROUP))
    low, high = parts.amin(-1), parts.amax(-1)
    scale = ((high - low) / 15).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    codes = ((parts - zero.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7)
    dense = codes * scale.float()[..., None] + zero.float()[..., None]
    packed = pack_fp4((codes.long() & 15).to(torch.uint8).flatten(1)).view(torch.int8)
    tensors = {"qdata": packed, "scale": scale.T.contiguous(), "zero_point": zero.T.contiguous()}
    return tensors, dense.flatten(1)


def store(settings: Mapping[str, Any], path: str, weight: Tensor) -> StoredWeight | None:
    if is_listed(settings["modules_to_not_convert"] or (), path):
        return None
    tensors, dense = quantise(TENSOR_TYPES[settings["quant_type"]["default"]["_type"]], weight)
    return StoredWeight({f"_weight_{name}": tensor for name, tensor in tensors.items()}, dense)


def header(tensor_type: str, dense: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> dict[str, str]:
    described = {"format": "pt", "tensor_names": json.dumps(list(dense))}
    for name, tensor in dense.items():
        start = f"{name.removesuffix('weight')}_weight_"
        parts = [item.removeprefix(start) for item in stored if item.startswith(start)]
        value: dict[str, Any] = {"_type": "Tensor"}
        if parts:
            data = attributes(tensor_type, tensor.shape)
            value = {"_type": tensor_type, "_data": data, "_tensor_data_names": parts}
        described[name] = json.dumps(value)
    return described


def value_at(tensors: dict[str, Tensor], row: int, column: int) -> float:
    """One element of the dense weight. The type of tensor follows from the shapes."""
    qdata, scale, zero = (tensors.get(f"_weight_{name}") for name in ("qdata", "scale", "zero_point"))
    assert qdata is not None and scale is not None
    if qdata.dtype == torch.float8_e4m3fn:
        return e4m3(qdata.view(torch.uint8)[row, column].item()) * scale[row, 0].item()
    assert zero is not None
    if zero.dtype == torch.bfloat16:
        code = qdata[row, column // 2].item() >> 4 * (column % 2) & 15
        group = column // INT4_GROUP
        return (code - 16 * (code > 7)) * scale[group, row].item() + zero[group, row].item()
    group = column * scale.shape[1] // qdata.shape[1]
    return (qdata[row, column].item() - zero[row, group].item()) * scale[row, group].item()


def torchao(config: str, dense: list[str] | None = None) -> Format:
    settings = {
        "quant_method": "torchao", "include_input_output_embeddings": False, "modules_to_not_convert": dense,
        "quant_type": {"default": {"_type": config, "_version": 2, "_data": CONFIGS[config]}},
        "untie_embedding_weights": False,
    }  # fmt: skip
    return Format(settings, store_projections(partial(store, settings)), header=partial(header, TENSOR_TYPES[config]))


FORMATS: dict[str, Format] = {
    "int8": torchao("Int8WeightOnlyConfig"),
    "float8": torchao("Float8WeightOnlyConfig", ["model.layers.0.self_attn", "lm_head"]),
    "intx": torchao("IntxWeightOnlyConfig"),
    "int4": torchao("Int4WeightOnlyConfig"),
}
