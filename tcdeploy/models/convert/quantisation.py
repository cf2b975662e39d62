"""Recognises quantised checkpoints, and prepares the one kind that is served: gpt-oss with MXFP4 experts.

A method is recognised by the config, by a file beside it, or by the names and dtypes of tensors. Weights of a method in
METHODS stay quantised, in a scheme (planning/schemes.py). METHODS is empty, so every method is refused by name except
MXFP4, which transformers dequantises while loading. By default it does so only if its MXFP4 kernels cannot run;
otherwise it would replace the experts by modules that call kernels from the Hub inside a compiled region.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tcdeploy.errors import ModelError, UnsupportedModelError
from tcdeploy.models.location import HINT, read_json_object
from tcdeploy.planning.schemes import SCHEMES, Scheme

MODEL_OPTIMIZER_FILE = "hf_quant_config.json"  # of TensorRT Model Optimizer; config.json may not mention it
NOT_QUANTISED_HINT = "use the original model in bfloat16, or dequantise the weights first"
QUANTISED_SUFFIXES = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight", "SCB", "weight.absmax")
# Dtypes of weights that hold values of their own. F8_E8M0 is a dtype of scales only.
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")  # that gpt-oss has in MXFP4
MXFP4_SUFFIXES = ("_blocks", "_scales")
MXFP4_BLOCK = 32  # values that share a scale; two values per byte
SETTINGS = ("quantization_config", "compression_config")  # keys of a config
# (settings of the method, path) -> the name of the scheme; None: the weight is dense. It gets paths of linear layers in
# the model, and all paths in the checkpoint, which are other names if transformers renames tensors.
SchemeName: TypeAlias = Callable[[Mapping[str, Any], str], str | None]
METHODS: dict[str, SchemeName] = {}  # by `quant_method` of the config


class TensorHeader(NamedTuple):
    """A tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]


def quantisation_method(config: PreTrainedConfig) -> str | None:
    """The quantisation method that the config or its text config names. MLX states its settings without a name."""
    for part in (config, config.get_text_config()):
        mlx_settings = getattr(part, "quantization", None)
        if isinstance(mlx_settings, dict) and {"bits", "group_size"} & mlx_settings.keys():
            return "MLX"
    settings = _settings(config)
    if settings is None:
        return None
    method = settings.get("quant_method") or settings.get("quant_algo") or "an unknown method"
    return str(getattr(method, "value", method))


def _settings(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The settings of quantisation, None if there are none. Empty ones are an error in transformers too."""
    for part in (config, config.get_text_config()):
        for name in SETTINGS:
            if (settings := getattr(part, name, None)) is not None:
                return settings if isinstance(settings, dict) else dict(getattr(settings, "to_dict", dict)())
    return None


def without_settings(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with which transformers does not quantise or dequantise."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        for name in SETTINGS:
            part.__dict__.pop(name, None)
    return config


def has_schemes(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is quantised with a method of METHODS, so that its weights stay quantised."""
    return quantisation_method(config) in METHODS


def schemes_of(config: PreTrainedConfig) -> Callable[[str], Scheme | None]:
    """The scheme of the linear layer with a path; None if its weight is dense."""
    scheme_name, settings = METHODS.get(quantisation_method(config) or ""), _settings(config) or {}

    def scheme_of(path: str) -> Scheme | None:
        name = scheme_name(settings, path) if scheme_name is not None else None
        return None if name is None else SCHEMES[name]

    return scheme_of


def is_dequantised(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is quantised, and transformers dequantises it while loading."""
    return quantisation_method(config) == "mxfp4" and config.model_type == "gpt_oss"


def check_method(model: str, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError for quantised weights that cannot be served. Reads no weights."""
    method = quantisation_method(config)
    if method and method not in METHODS and not is_dequantised(config):
        message = f"{model} is quantised with {method}, which is not supported yet"
        raise UnsupportedModelError(message, NOT_QUANTISED_HINT)


def check_model_optimizer(model: str, path: Path | None) -> None:
    """Raise UnsupportedModelError unless a MODEL_OPTIMIZER_FILE says that only the KV cache is quantised.

    `path`: None if the file cannot be read, because the model has not been downloaded.
    """
    settings = read_json_object(path).get("quantization") if path else {"quant_algo": "unknown"}
    if not isinstance(settings, dict) or "quant_algo" not in settings:
        raise ModelError(f"{path} does not state quant_algo, the format of the weights", HINT)
    if settings["quant_algo"] is not None:
        message = f"{model} is quantised with TensorRT Model Optimizer (it has {MODEL_OPTIMIZER_FILE})"
        raise UnsupportedModelError(f"{message}, which is not supported yet", NOT_QUANTISED_HINT)


def check_not_quantised(model: str, tensors: dict[str, TensorHeader], is_mxfp4: bool = False) -> None:
    """Recognise quantised weights by the dtypes and names of their tensors.

    `is_mxfp4`: MXFP4 tensors that `dequantised_tensors` leaves are incomplete, not of another method.
    """
    weights = ("weight", *EXPERT_WEIGHTS, *(() if is_mxfp4 else MXFP4_SUFFIXES))
    for name, tensor in tensors.items():
        is_quantised = tensor.dtype not in FLOAT_DTYPES and name.endswith(weights)
        if is_quantised or name.endswith(QUANTISED_SUFFIXES):
            message = f"{model} has quantised weights, which are not supported yet: {name} has the dtype {tensor.dtype}"
            raise UnsupportedModelError(message, NOT_QUANTISED_HINT)


def dequantised_tensors(tensors: dict[str, TensorHeader]) -> dict[str, TensorHeader]:
    """The tensors of an MXFP4 checkpoint as they are after dequantisation.

    NAME_blocks [experts, outputs, groups, 16] and NAME_scales [experts, outputs, groups] become NAME
    [experts, inputs, outputs]. Tensors that do not fit together stay as they are.
    """
    dequantised = dict(tensors)
    for name, scales in tensors.items():
        weight = name.removesuffix("_scales")
        blocks = tensors.get(f"{weight}_blocks")
        has_scales = name != weight and weight.endswith(EXPERT_WEIGHTS) and len(scales.shape) == 3
        if has_scales and blocks and blocks.shape == (*scales.shape, MXFP4_BLOCK // 2):
            experts, outputs, groups = scales.shape
            del dequantised[name], dequantised[f"{weight}_blocks"]
            dequantised[weight] = TensorHeader("BF16", (experts, groups * MXFP4_BLOCK, outputs))
    return dequantised


def cast_experts(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast dequantised weights to the model's dtype, in place: transformers 5.17 leaves them in bfloat16."""
    for name, parameter in model.named_parameters():
        if name.endswith(EXPERT_WEIGHTS) and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
