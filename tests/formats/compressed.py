"""compressed-tensors: what llm-compressor writes, and RedHatAI, neuralmagic, Kimi and NVFP4 models of others contain.

config.json's quantization_config has quant_method "compressed-tensors", `config_groups`, `format` and `ignore`. A group
has `targets`, `weights` and `input_activations` (how a kernel rounds inputs; the stored weight does not depend on it).
Newer files repeat `format` in the group, state "mixed-precision" above if groups differ in it, and have `scale_dtype`.
A target is a class name ("Linear"), the path of a module, or `re:` and a regular expression that must match from the
path's start (`re.match`, so "re:.*mlp.gate$"). An exact path wins over an expression, that over a class. `ignore` has
the same forms and wins over targets. Paths are those of the saved model's modules: "lm_head",
"model.layers.0.mlp.gate". Versions since transformers 5 write the names of the checkpoint instead where transformers
renames (`_map_to_checkpoint_names`). Lists in public files: ["lm_head"] of most; all gates by path in Mixtral and
Qwen3-MoE; ["re:.*lm_head", "re:visual.*", "re:model.visual.*", "re:.*mlp.gate$"] of Qwen3-VL-MoE; ["re:.*self_attn.*",
"re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"] of Kimi's models, which only have
experts in 4 bits; some list several hundred paths of a vision tower.

Tensors beside a layer's path, for a weight [n, k] (scales in the model's dtype unless stated):

- float-quantized (naive-quantized without activations): weight F8_E4M3 [n, k]; weight_scale [n, 1] (channel), [1] or
  [] (tensor), [ceil(n / 128), ceil(k / 128)] (block, `block_structure`); input_scale [1] if activations are static.
- int-quantized: weight I8 [n, k]; weight_scale [n, 1]; asymmetric: weight_zero_point I8 [n, 1].
- pack-quantized, `num_bits` 4 or 8: weight_packed I32 [n, ceil(k * bits / 32)], the first column in the lowest bits,
  codes offset by 2 ** (bits - 1); weight_scale [n, k / group_size] or [n, 1]; weight_shape I64 [2], the values [n, k];
  asymmetric: weight_zero_point I32 [ceil(n * bits / 32), groups], packed along the rows with the same offset;
  `actorder` "group": weight_g_idx I32 [k], the group of each column, which stays in its place. "weight" and "static"
  sort groups during calibration only, and have no weight_g_idx.
- nvfp4-pack-quantized: weight_packed U8 [n, k / 2], the first column in the low nibble; weight_scale F8_E4M3
  [n, k / 16]; weight_global_scale F32 [1], a divisor: value = FP4 * weight_scale / weight_global_scale;
  input_global_scale F32 [1], a divisor too, if activations are in FP4.
- mxfp4-pack-quantized: the same weight_packed; weight_scale U8 [n, k / 32] as E8M0; no global scale.
- mxfp8-quantized: weight F8_E4M3 [n, k]; weight_scale U8 [n, k / 32] as E8M0.
- `kv_cache_scheme`: k_scale and v_scale [1] beside the attention module's path, model.layers.0.self_attn.k_scale.

Established from compressed-tensors 0.20.1 and, for weight_g_idx, 0.9.4 and 0.12 (0.20 removed it); from vLLM's
compressed_tensors_wNa16.py for names and dtypes; and from vllm-project/llm-compressor's recipes for ignore lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.formats.checkpoint import Format, StoredWeight, scalar, store_projections
from tests.formats.number_formats import (
    code_at,
    e2m1,
    e4m3,
    e8m0,
    e8m0_codes,
    e8m0_floats,
    pack_bits,
    to_fp8,
    to_fp8_blocks,
    to_integers,
    to_mxfp4,
    to_nvfp4,
)

Arguments = Mapping[str, Any]
Values = dict[str, Tensor]
SCALE_DTYPE = torch.bfloat16


def arguments(bits: int, kind: str, strategy: str, **changes: Any) -> dict[str, Any]:
    """The quantisation arguments of weights or activations, with all keys that files have."""
    unused = {"actorder": None, "block_structure": None, "group_size": None, "observer_kwargs": {}}
    used = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    return {**unused, **used, "observer": "minmax", **changes}


def group(weights: Arguments, inputs: Arguments | None = None, targets: Iterable[str] = ("Linear",)) -> dict[str, Any]:
    return {"targets": list(targets), "weights": weights, "input_activations": inputs, "output_activations": None}


def config(form: str, *groups: Mapping[str, Any], ignore: Iterable[str] = ("lm_head",), **changes: Any) -> Arguments:
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {f"group_{index}": item for index, item in enumerate(groups)}, "ignore": list(ignore),
        "kv_cache_scheme": None, "global_compression_ratio": None, **changes,
    }  # fmt: skip


def matches(pattern: str, path: str) -> bool:
    """Whether a target or an ignored name is the path of a module, or an expression that matches it."""
    return re.match(pattern[3:], path) is not None if pattern.startswith("re:") else pattern == path


def group_of(settings: Arguments, path: str) -> Mapping[str, Any] | None:
    """The group of a linear layer; None if it stays dense."""
    if any(matches(pattern, path) for pattern in settings["ignore"]):
        return None
    for is_wanted in (lambda item: matches(item, path), lambda item: item == "Linear"):
        for item in settings["config_groups"].values():
            if any(map(is_wanted, item["targets"])):
                return item
    return None


def store_float(weights: Arguments, weight: Tensor, scale_shape: tuple[int, ...] = (1,)) -> StoredWeight:
    """`scale_shape`: of the scale of a whole tensor, (1,) or ()."""
    strategy = weights["strategy"]
    block = {"block": weights["block_structure"], "channel": (1, weight.shape[1])}.get(strategy, weight.shape)
    stored = to_fp8_blocks(weight, *block, lambda scale: scale.to(SCALE_DTYPE))
    scale = stored.scale.view(scale_shape) if strategy == "tensor" else stored.scale
    return StoredWeight({"weight": stored.codes, "weight_scale": scale}, stored.weight)


def store_mxfp8(weights: Arguments, weight: Tensor) -> StoredWeight:
    parts = weight.unflatten(1, (-1, weights["group_size"]))
    scale = e8m0_codes(parts.abs().amax(-1), 8)
    factors = e8m0_floats(scale)[..., None]
    stored = to_fp8(parts / factors)
    tensors = {"weight": stored.flatten(1), "weight_scale": scale}
    return StoredWeight(tensors, (stored.float() * factors).flatten(1))


def store_int8(weights: Arguments, weight: Tensor) -> StoredWeight:
    integers = to_integers(weight, 8, -1, weights["symmetric"], SCALE_DTYPE)
    tensors = {"weight": (integers.codes - 128).to(torch.int8), "weight_scale": integers.scales}
    if not weights["symmetric"]:
        tensors["weight_zero_point"] = (integers.zeros - 128).to(torch.int8)
    return StoredWeight(tensors, integers.weight)


def store_packed(weights: Arguments, weight: Tensor) -> StoredWeight:
    bits, size = weights["num_bits"], weights["group_size"] or -1
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    groups = order // size if weights["actorder"] == "group" else None
    integers = to_integers(weight, bits, size, weights["symmetric"], SCALE_DTYPE, groups)
    tensors = {
        "weight_packed": pack_bits(integers.codes, bits, 1),
        "weight_scale": integers.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not weights["symmetric"]:
        tensors["weight_zero_point"] = pack_bits(integers.zeros, bits, 0)
    if groups is not None:
        tensors["weight_g_idx"] = groups.to(torch.int32)
    return StoredWeight(tensors, integers.weight)


def store_nvfp4(weights: Arguments, weight: Tensor) -> StoredWeight:
    stored = to_nvfp4(weight)
    assert stored.global_scale is not None
    tensors = {"weight_packed": stored.packed, "weight_scale": stored.scale}
    return StoredWeight({**tensors, "weight_global_scale": 1 / stored.global_scale.view(1)}, stored.weight)


def store_mxfp4(weights: Arguments, weight: Tensor) -> StoredWeight:
    stored = to_mxfp4(weight)
    return StoredWeight({"weight_packed": stored.packed, "weight_scale": stored.scale}, stored.weight)


STORES = {
    "float-quantized": store_float, "naive-quantized": store_float, "int-quantized": store_int8,
    "pack-quantized": store_packed, "nvfp4-pack-quantized": store_nvfp4, "mxfp4-pack-quantized": store_mxfp4,
    "mxfp8-quantized": store_mxfp8,
}  # fmt: skip


def store(settings: Arguments, options: Mapping[str, Any], path: str, weight: Tensor) -> StoredWeight | None:
    """As the settings say. `options`: what a config does not say."""
    item = group_of(settings, path)
    if item is None:
        return None
    stored = STORES[item.get("format") or settings["format"]](item["weights"], weight, **options)
    inputs = item["input_activations"]
    if inputs is not None and inputs["dynamic"] is False:
        stored.tensors["input_scale"] = scalar(path, SCALE_DTYPE, (1,))
    if inputs is not None and inputs["dynamic"] == "local":
        stored.tensors["input_global_scale"] = 1 / scalar(path, shape=(1,))
    return stored


def kv_scales(names: Iterable[str]) -> Values:
    paths = [name.removesuffix(".k_proj.weight") for name in names if name.endswith(".self_attn.k_proj.weight")]
    names = [f"{path}.{scale}" for path in paths for scale in ("k_scale", "v_scale")]
    return {name: scalar(name, SCALE_DTYPE, (1,)) for name in names}


def compressed(settings: Arguments, **options: Any) -> Format:
    extra = kv_scales if settings["kv_cache_scheme"] else lambda _: {}
    return Format(settings, store_projections(partial(store, settings, options)), extra_tensors=extra)


def value_at(form: str, weights: Arguments, tensors: Values, row: int, column: int) -> float:
    """One element of the dense weight, from the definition of the format."""
    scale, bits = tensors["weight_scale"], weights["num_bits"]
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        code = e2m1(tensors["weight_packed"][row, column // 2].item() >> 4 * (column % 2) & 15)
        part = scale.view(torch.uint8)[row, column // weights["group_size"]].item()
        if form == "mxfp4-pack-quantized":
            return code * e8m0(part)
        return code * e4m3(part) / tensors["weight_global_scale"].item()
    if form == "mxfp8-quantized":
        return e4m3(tensors["weight"].view(torch.uint8)[row, column].item()) * e8m0(scale[row, column // 32].item())
    if form == "pack-quantized":
        size = weights["group_size"] or tensors["weight_shape"][1].item()
        place = tensors["weight_g_idx"][column].item() if "weight_g_idx" in tensors else column // size
        zero = 2 ** (bits - 1)
        if "weight_zero_point" in tensors:
            zero = code_at(tensors["weight_zero_point"][:, place].tolist(), row, bits)
        return (code_at(tensors["weight_packed"][row].tolist(), column, bits) - zero) * scale[row, place].item()
    if form == "int-quantized":
        zero = tensors["weight_zero_point"][row, 0].item() if "weight_zero_point" in tensors else 0
        return (tensors["weight"][row, column].item() - zero) * scale[row, 0].item()
    places = {"channel": (row, 0), "block": (row // 128, column // 128)}
    factor = scale[places[weights["strategy"]]] if weights["strategy"] in places else scale
    return e4m3(tensors["weight"].view(torch.uint8)[row, column].item()) * factor.item()


TOKEN_FP8 = arguments(8, "float", "token", dynamic=True, observer=None)
TENSOR_FP8 = arguments(8, "float", "tensor")
CHANNEL_FP8 = arguments(8, "float", "channel")
BLOCK_FP8 = arguments(8, "float", "block", block_structure=[128, 128])
GROUP_FP8 = arguments(8, "float", "group", group_size=128, dynamic=True, observer=None)
TOKEN_INT8 = arguments(8, "int", "token", dynamic=True, observer=None)
CHANNEL_INT8 = arguments(8, "int", "channel")
ASYMMETRIC_INT8 = arguments(8, "int", "channel", symmetric=False)
GROUP_INT4 = arguments(4, "int", "group", group_size=128)
OLD_NVFP4 = arguments(4, "float", "tensor_group", group_size=16)
NVFP4 = {**OLD_NVFP4, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None}
MXFP4 = arguments(4, "float", "group", group_size=32, scale_dtype="torch.uint8", zp_dtype=None)
SOME_DENSE = ("lm_head", "model.layers.1.mlp.down_proj", "re:.*layers\\.0\\.self_attn\\.o_proj$")
ATTENTION = ("re:.*self_attn\\.(q|k|v|o)_proj$",)

FORMATS: dict[str, Format] = {
    "float channel": compressed(config("float-quantized", group(CHANNEL_FP8, TOKEN_FP8))),
    "float tensor": compressed(config("float-quantized", group(TENSOR_FP8, TENSOR_FP8), ignore=SOME_DENSE)),
    "float scalar": compressed(config("float-quantized", group(TENSOR_FP8, TENSOR_FP8)), scale_shape=()),
    "float block": compressed(config("float-quantized", group(BLOCK_FP8, GROUP_FP8), ignore=["re:.*lm_head"])),
    "float weights only": compressed(config("naive-quantized", group(CHANNEL_FP8))),
    "float and kv": compressed(config("float-quantized", group(TENSOR_FP8, TENSOR_FP8), kv_cache_scheme=TENSOR_FP8)),
    "int8": compressed(config("int-quantized", group(CHANNEL_INT8, TOKEN_INT8))),
    "int8 asymmetric": compressed(config("int-quantized", group(ASYMMETRIC_INT8, TOKEN_INT8))),
    "int4 group 128": compressed(config("pack-quantized", group(GROUP_INT4), ignore=SOME_DENSE)),
    "int4 group 32": compressed(config("pack-quantized", group({**GROUP_INT4, "group_size": 32}))),
    "int4 channel": compressed(config("pack-quantized", group(arguments(4, "int", "channel")))),
    "int4 asymmetric": compressed(config("pack-quantized", group({**GROUP_INT4, "symmetric": False}))),
    "int4 g_idx": compressed(config("pack-quantized", group({**GROUP_INT4, "actorder": "group"}))),
    "int4 asymmetric g_idx": compressed(
        config("pack-quantized", group({**GROUP_INT4, "symmetric": False, "actorder": "group"}))
    ),
    "int8 packed": compressed(config("pack-quantized", group({**GROUP_INT4, "num_bits": 8}))),
    "int8 packed channel": compressed(config("pack-quantized", group(CHANNEL_INT8))),
    "nvfp4": compressed(config("nvfp4-pack-quantized", group(NVFP4, {**NVFP4, "dynamic": "local"}))),
    "nvfp4 weights only": compressed(config("nvfp4-pack-quantized", group(OLD_NVFP4))),
    "mxfp4": compressed(config("mxfp4-pack-quantized", group(MXFP4))),
    "mxfp8": compressed(config("mxfp8-quantized", group({**MXFP4, "num_bits": 8}))),
    "mixed": compressed(
        config(
            "mixed-precision",
            {**group(CHANNEL_FP8, TOKEN_FP8, ATTENTION), "format": "float-quantized"},
            {**group(GROUP_INT4), "format": "pack-quantized"},
            ignore=SOME_DENSE,
        )
    ),
}
