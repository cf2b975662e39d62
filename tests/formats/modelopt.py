"""TensorRT Model Optimizer (nvidia/*-FP8, *-NVFP4): `quant_method` "modelopt", in config.json or in a file beside it.

hf_quant_config.json has {"producer", "quantization": {"quant_algo", "kv_cache_quant_algo", "exclude_modules",
"group_size", ...}}. Newer releases also write quantization_config into config.json: "quant_algo" flat,
`kv_cache_scheme` an object instead of a name, and the list is called `ignore`; older ones leave config.json without a
word. `config_groups` repeats bits for tools of compressed-tensors; its tensors are other ones.

Excluded modules are wildcards as of fnmatch, in which * also matches dots: "lm_head", "model.layers.0*" (which matches
layers 0 only if no layer 01 exists; it is written for a whole dense subtree), "model.layers.61.self_attn*",
"model.visual*", "mtp*", "model.language_model.layers.0.self_attn*", "model.layers.*.mlp.gate". Files before 0.39 may
mean parts of paths: vLLM also takes an entry that occurs within the path. Paths are those of the checkpoint's tensors.

Tensors beside a layer's path, for a weight [n, k]:

- FP8: weight F8_E4M3 [n, k], weight_scale F32 [], input_scale F32 [].
- FP8_PER_CHANNEL_PER_TOKEN: weight_scale F32 [n]; no input_scale.
- FP8_PB_WO: weight_scale F32 [ceil(n / 128), 1, k / 128, 1]; no input_scale. (Some files have weight_scale_inv with two
  dimensions instead, as DeepSeek.)
- NVFP4: weight U8 [n, k / 2], the first column in the low nibble; weight_scale F8_E4M3 [n, k / 16]; weight_scale_2 F32
  [], a factor: value = FP4 * weight_scale * weight_scale_2; input_scale F32 [], a factor. compressed-tensors stores the
  reciprocals of both. W4A16_NVFP4 has no input_scale. Layers that are joined for a kernel (query, key and value; gate
  and up) have equal weight_scale_2 if calibrated so, which a reader must not rely on.
- KV cache in FP8: self_attn.k_proj.k_scale and self_attn.v_proj.v_scale, F32 []. In NVFP4 files too.
- MIXED_PRECISION: `quantized_layers` maps the path of a layer, or of a parent ("...mlp.experts"), to {"quant_algo",
  "group_size"}; layers that are absent are dense. config.json repeats it as groups whose targets are those paths.

Established from vLLM's modelopt.py (names, shapes, wildcards), compressed-tensors 0.20.1's ModelOptNvfp4Converter
(with which NVFP4 is compared), TensorRT-LLM's and aiconfigurator's tests with configs of nvidia/GLM-5.2-NVFP4,
Qwen3.6-35B-A3B-NVFP4 and Nemotron. modelopt itself was not run; its FP8 forms are compared with the definition only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.formats.checkpoint import Format, StoredWeight, scalar, store_projections
from tests.formats.number_formats import e2m1, e4m3, to_fp8_blocks, to_nvfp4

SIDECAR = "hf_quant_config.json"
PRODUCER = {"name": "modelopt", "version": "0.39.0"}
FP8_ARGUMENTS = {"dynamic": False, "num_bits": 8, "type": "float"}
NVFP4_ARGUMENTS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
WILDCARDS = ("lm_head", "model.layers.0.self_attn*", "model.layers.*.mlp.down_proj")


def algorithm_of(settings: Mapping[str, Any], path: str) -> str | None:
    """The algorithm of a layer, by the settings of a SIDECAR; None if it stays dense."""
    if any(fnmatch(path, pattern) for pattern in settings["exclude_modules"]):
        return None
    if settings["quant_algo"] != "MIXED_PRECISION":
        return settings["quant_algo"]
    layers = settings["quantized_layers"]
    names = [name for name in layers if f"{path}.".startswith(f"{name}.")]
    return layers[max(names, key=len)]["quant_algo"] if names else None


def store_fp8(algorithm: str, weight: Tensor) -> StoredWeight:
    block = {"FP8_PER_CHANNEL_PER_TOKEN": (1, weight.shape[1]), "FP8_PB_WO": (128, 128)}.get(algorithm, weight.shape)
    stored = to_fp8_blocks(weight, *block, torch.clone)
    rows, columns = stored.scale.shape
    shape = {"FP8_PER_CHANNEL_PER_TOKEN": (rows,), "FP8_PB_WO": (rows, 1, columns, 1)}.get(algorithm, ())
    return StoredWeight({"weight": stored.codes, "weight_scale": stored.scale.view(shape)}, stored.weight)


def store_nvfp4(weight: Tensor) -> StoredWeight:
    stored = to_nvfp4(weight)
    assert stored.global_scale is not None
    tensors = {"weight": stored.packed, "weight_scale": stored.scale, "weight_scale_2": stored.global_scale}
    return StoredWeight(tensors, stored.weight)


def store(settings: Mapping[str, Any], path: str, weight: Tensor) -> StoredWeight | None:
    algorithm = algorithm_of(settings, path)
    if algorithm is None:
        return None
    stored = store_nvfp4(weight) if algorithm.endswith("NVFP4") else store_fp8(algorithm, weight)
    if algorithm in ("FP8", "NVFP4"):
        stored.tensors["input_scale"] = scalar(path)
    return stored


def kv_scales(names: Iterable[str]) -> dict[str, Tensor]:
    scales = {"self_attn.k_proj.weight": "k_scale", "self_attn.v_proj.weight": "v_scale"}
    found = [
        name.removesuffix("weight") + scale for name in names for end, scale in scales.items() if name.endswith(end)
    ]
    return {name: scalar(name) for name in found}


def value_at(tensors: dict[str, Tensor], row: int, column: int) -> float:
    """One element of the dense weight."""
    weight, scale = tensors["weight"], tensors["weight_scale"]
    if weight.dtype == torch.uint8:
        code = e2m1(weight[row, column // 2].item() >> 4 * (column % 2) & 15)
        return code * e4m3(scale.view(torch.uint8)[row, column // 16].item()) * tensors["weight_scale_2"].item()
    places: dict[int, tuple[int, ...]] = {0: (), 1: (row,), 4: (row // 128, 0, column // 128, 0)}
    return e4m3(weight.view(torch.uint8)[row, column].item()) * scale[places[scale.ndim]].item()


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config of config.json, for the settings of a SIDECAR."""
    layers = settings.get("quantized_layers", {})
    algorithms = sorted({layer["quant_algo"] for layer in layers.values()}) or [settings["quant_algo"]]
    groups = {}
    for index, algorithm in enumerate(algorithms):
        values = NVFP4_ARGUMENTS if algorithm.endswith("NVFP4") else FP8_ARGUMENTS
        inputs = None if algorithm in ("W4A16_NVFP4", "FP8_PB_WO") else values
        targets = sorted(name for name, layer in layers.items() if layer["quant_algo"] == algorithm) or ["Linear"]
        groups[f"group_{index}"] = {"input_activations": inputs, "weights": values, "targets": targets}
    return {
        "quant_method": "modelopt",
        "quant_algo": settings["quant_algo"],
        "config_groups": groups,
        "ignore": settings["exclude_modules"],
        "producer": PRODUCER,
        **({"kv_cache_scheme": FP8_ARGUMENTS} if settings["kv_cache_quant_algo"] else {}),
        **({"quantized_layers": layers} if layers else {}),
    }


def modelopt(algorithm: str, sidecar: bool = True, main: bool = True, **changes: Any) -> Format:
    """`sidecar`, `main`: whether SIDECAR and config.json have the settings."""
    size = {"group_size": 16} if "NVFP4" in algorithm else {}
    settings = {
        "quant_algo": algorithm, "kv_cache_quant_algo": None, **size, "exclude_modules": ["lm_head"], **changes,
    }  # fmt: skip
    return Format(
        flat_settings(settings) if main else None,
        store_projections(partial(store, settings)),
        extra_tensors=kv_scales if settings["kv_cache_quant_algo"] else lambda _: {},
        files={SIDECAR: {"producer": PRODUCER, "quantization": settings}} if sidecar else {},
    )


MIXED_LAYERS = {
    **{f"model.layers.{layer}.self_attn.{part}_proj": {"quant_algo": "FP8"} for layer in (0, 1) for part in "qkv"},
    **{f"model.layers.{layer}.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for layer in (0, 1)},
    "model.layers.1.self_attn.o_proj": {"quant_algo": "NVFP4", "group_size": 16},
}

FORMATS: dict[str, Format] = {
    "fp8": modelopt("FP8", kv_cache_quant_algo="FP8"),
    "fp8 sidecar only": modelopt("FP8", main=False, exclude_modules=list(WILDCARDS)),
    "fp8 config only": modelopt("FP8", sidecar=False, exclude_modules=list(WILDCARDS)),
    "fp8 per channel": modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "fp8 blocks": modelopt("FP8_PB_WO"),
    "nvfp4": modelopt("NVFP4", kv_cache_quant_algo="FP8"),
    "nvfp4 sidecar only": modelopt("NVFP4", main=False, exclude_modules=list(WILDCARDS)),
    "nvfp4 weights only": modelopt("W4A16_NVFP4"),
    "mixed": modelopt("MIXED_PRECISION", quantized_layers=MIXED_LAYERS, exclude_modules=["lm_head", "mtp*"]),
}
