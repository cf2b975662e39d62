"""The quantisation methods that config.json names, and the formats in which each stores weights.

Which layers are quantised is read from the checkpoint's tensors, not from lists of names in the config: those use the
names of modules in whatever class quantised the model. The config states only what tensors do not show, such as the
size of blocks. For random weights there are no tensors, and `scheme_finder` follows the config.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from tcdeploy.errors import UnsupportedModelError
from tcdeploy.models.formats import fp4_weights, gguf_weights, library_weights, packed_weights, scaled_weights
from tcdeploy.models.formats.layer_names import is_listed
from tcdeploy.models.formats.quantised_weight import Layer, LayerScheme, QuantisedWeight
from tcdeploy.planning.schemes import int4_scheme_name

NOT_QUANTISED_HINT = "use the original model in bfloat16, or dequantise the weights first"
SETTINGS = ("quantization_config", "compression_config")  # keys of a config
FIRST_EXPERT = {"gate_up_proj": "0.gate_proj", "up_proj": "0.up_proj", "down_proj": "0.down_proj"}
EXPLICIT = "tcdeploy"  # the method of configs that state the scheme of each layer: of --quantize and compile workers
Settings = Mapping[str, Any]


class Method(NamedTuple):
    """find: the weights of a layer of a checkpoint, by the rest of their names; those that are not quantised are left
    out. scheme_of: the scheme of a linear layer by path in the model, for random weights. Both get the settings.
    has_negative_scales: AutoRound uses the sign of a symmetric scale, also in files that it writes as those of GPTQ.
    has_fp8_inputs: whether the checkpoint asks for inputs in FP8 where weights are FP8.
    names_stacks: `scheme_of` gets the path of stacked experts instead of that of the first expert's linear layer.
    """

    find: Callable[[Settings, Layer], Mapping[str, QuantisedWeight | None]]
    scheme_of: Callable[[Settings, str], LayerScheme | None]
    has_negative_scales: bool = False
    has_fp8_inputs: Callable[[Settings], bool] = lambda settings: False
    names_stacks: bool = False


def quantisation_method(config: PreTrainedConfig) -> str | None:
    """The quantisation method that the config or its text config names. MLX states its settings without a name."""
    for part in (config, config.get_text_config()):
        mlx_settings = getattr(part, "quantization", None)
        if isinstance(mlx_settings, dict) and {"bits", "group_size"} & mlx_settings.keys():
            return "MLX"
    settings = quantisation_settings(config)
    if settings is None:
        return None
    method = settings.get("quant_method") or settings.get("quant_algo") or "an unknown method"
    return str(getattr(method, "value", method))


def quantisation_settings(config: PreTrainedConfig) -> dict[str, Any] | None:
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


def is_quantised(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is quantised with a method of METHODS."""
    return quantisation_method(config) in METHODS


def check_method(model: str, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError for quantised weights that cannot be served. Reads no weights."""
    method, settings = quantisation_method(config), quantisation_settings(config) or {}
    if method and method not in METHODS:
        message = f"{model} is quantised with {method}, which is not supported yet"
        raise UnsupportedModelError(message, NOT_QUANTISED_HINT)
    for name in UNSUPPORTED_SETTINGS.get(method or "", ()):
        if settings.get(name):
            message = f"{model} is quantised with {method} and {name}, which is not supported yet"
            raise UnsupportedModelError(message, NOT_QUANTISED_HINT)


def scheme_finder(config: PreTrainedConfig) -> Callable[[str], LayerScheme | None]:
    """The scheme of a linear layer by path in the model, according to the config. None: its weight is dense."""
    method, settings = METHODS.get(quantisation_method(config) or ""), quantisation_settings(config) or {}
    if method is None:
        return lambda path: None
    return lambda path: method.scheme_of(settings, path if method.names_stacks else _first_expert(path))


def _first_expert(path: str) -> str:
    """For stacked experts, the path that the first expert's linear layer has in most checkpoints; else the path."""
    parent, _, name = path.rpartition(".")
    is_stack = parent.rpartition(".")[2] == "experts" and name in FIRST_EXPERT
    return f"{parent}.{FIRST_EXPERT[name]}" if is_stack else path


def requested_scheme_finder(config: PreTrainedConfig) -> Callable[[str], LayerScheme | None]:
    """As `scheme_finder`, but only of layers whose weights are dense in the checkpoint (convert/requested_schemes.py).

    For other methods, the tensors of the checkpoint show the scheme.
    """
    return scheme_finder(config) if quantisation_method(config) == EXPLICIT else (lambda path: None)


def has_fp8_inputs(config: PreTrainedConfig) -> bool:
    """Whether the config asks for inputs in FP8 where weights are FP8, with static or dynamic scales."""
    method = METHODS.get(quantisation_method(config) or "")
    return method is not None and method.has_fp8_inputs(quantisation_settings(config) or {})


def explicit_settings(schemes: Mapping[str, LayerScheme], fp8_inputs: bool) -> dict[str, Any]:
    """Settings of a config that states the scheme of each layer by path."""
    stated = {path: [*scheme] for path, scheme in schemes.items()}
    return {"quant_method": EXPLICIT, "schemes": stated, "fp8_inputs": fp8_inputs}


# The weights of a layer of a checkpoint


def _find_fp8(settings: Settings, layer: Layer) -> dict[str, QuantisedWeight | None]:
    return {"weight": scaled_weights.find_fp8_weight(layer, _block(settings.get("weight_block_size")))}


def _find_compressed(settings: Settings, layer: Layer) -> dict[str, QuantisedWeight | None]:
    structures = {str(arguments.get("block_structure")) for arguments in _arguments(settings)} - {"None"}
    block = next(iter(structures)) if len(structures) == 1 else None
    bits = {int(arguments["num_bits"]) for arguments in _arguments(settings) if arguments.get("num_bits")}
    permuted = {_is_permuted(arguments) for arguments in _arguments(settings)}
    return {
        "weight": packed_weights.find_compressed_weight(layer, bits or packed_weights.BITS, permuted == {True})
        or fp4_weights.find_nvfp4_weight(layer)
        or fp4_weights.find_mxfp4_weight(layer)
        or scaled_weights.find_fp8_weight(layer, _block(block))
        or scaled_weights.find_int8_weight(layer)
    }


def _find_model_optimizer(settings: Settings, layer: Layer) -> dict[str, QuantisedWeight | None]:
    return {"weight": fp4_weights.find_nvfp4_weight(layer) or scaled_weights.find_fp8_weight(layer)}


def _find_gptq(settings: Settings, layer: Layer) -> dict[str, QuantisedWeight | None]:
    zero_offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    return {"weight": packed_weights.find_gptq_weight(layer, zero_offset, bool(settings.get("desc_act")))}


def _find_awq(settings: Settings, layer: Layer) -> dict[str, QuantisedWeight | None]:
    return {"weight": packed_weights.find_awq_weight(layer)}


def _find_auto_round(settings: Settings, layer: Layer) -> dict[str, QuantisedWeight | None]:
    packing = _packing_format(settings)
    if "awq" in packing:
        return _find_awq(settings, layer)
    zero_offset = 0 if packing in ("auto_round", "auto_round:gptqmodel") else 1
    return {"weight": packed_weights.find_gptq_weight(layer, zero_offset)}


def _packing_format(settings: Settings) -> str:
    """Of AutoRound."""
    return str(settings.get("packing_format") or settings.get("backend") or "")


def _find_bitsandbytes(settings: Settings, layer: Layer) -> dict[str, QuantisedWeight | None]:
    return {"weight": library_weights.find_bitsandbytes_weight(layer)}


def _find_torchao(settings: Settings, layer: Layer) -> dict[str, QuantisedWeight | None]:
    return {"weight": library_weights.find_torchao_weight(layer)}


def _find_gguf(settings: Settings, layer: Layer) -> Mapping[str, QuantisedWeight | None]:
    return gguf_weights.find_gguf_weights(settings, layer)


def _find_mxfp4(settings: Settings, layer: Layer) -> Mapping[str, QuantisedWeight | None]:
    return fp4_weights.find_mxfp4_experts(layer)


# The schemes of linear layers, from the config alone


def _fp8_scheme(settings: Settings, path: str) -> LayerScheme | None:
    if _is_head(path) or is_listed(path, _listed(settings, "modules_to_not_convert", "ignored_layers")):
        return None
    match _block(settings.get("weight_block_size")):
        case None:
            return LayerScheme("fp8_channel")
        case scaled_weights.BLOCK:
            return LayerScheme("fp8_block")
    return None


def _compressed_scheme(settings: Settings, path: str) -> LayerScheme | None:
    if is_listed(path, _listed(settings, "ignore")):
        return None
    for targets in (lambda names: is_listed(path, names), lambda names: "Linear" in names):
        for group in (settings.get("config_groups") or {}).values():
            if targets(group.get("targets") or ()):
                return _scheme_of_arguments(group.get("weights") or {})
    return None


def _scheme_of_arguments(arguments: Mapping[str, Any]) -> LayerScheme | None:
    """The scheme of weights of compressed-tensors."""
    group_size = _group_size(arguments)
    match arguments.get("type"), arguments.get("num_bits"), arguments.get("strategy"):
        case "float", 8, "block":
            return (
                LayerScheme("fp8_block") if _block(arguments.get("block_structure")) == scaled_weights.BLOCK else None
            )
        case "float", 8, "tensor" | "channel":
            return LayerScheme("fp8_channel")
        case "float", 4, _:
            return LayerScheme("mxfp4" if group_size == fp4_weights.BLOCK else "nvfp4")
        case "int", 8, _ if arguments.get("symmetric", True):
            return LayerScheme("int8", group_size)
        case "int", 4, _:
            return _int4("bfloat16", group_size, not arguments.get("symmetric", True), _is_permuted(arguments))
    return None


def _is_permuted(arguments: Mapping[str, Any]) -> bool:
    """Whether weights of compressed-tensors have a `weight_g_idx`. "weight" and "static" only change calibration."""
    return str(arguments.get("actorder")).rpartition(".")[2].lower() in ("group", "dynamic", "true")


def _model_optimizer_scheme(settings: Settings, path: str) -> LayerScheme | None:
    if is_listed(path, _listed(settings, "ignore", "exclude_modules")):
        return None
    algorithm = str(settings.get("quant_algo") or "")
    return LayerScheme("nvfp4" if "NVFP4" in algorithm else "fp8_channel") if "FP" in algorithm else None


def _gptq_scheme(settings: Settings, path: str) -> LayerScheme | None:
    if _is_head(path) and not settings.get("lm_head"):
        return None
    group_size, bits = _group_size(settings), settings.get("bits")
    if bits == 4:
        return _int4("float16", group_size, not settings.get("sym", True), bool(settings.get("desc_act")))
    return LayerScheme("int8", group_size) if bits == 8 and settings.get("sym", True) else None


def _awq_scheme(settings: Settings, path: str) -> LayerScheme | None:
    is_dense = _is_head(path) or is_listed(path, _listed(settings, "modules_to_not_convert"))
    return None if is_dense else _int4("float16", _group_size(settings), True, False)


def _auto_round_scheme(settings: Settings, path: str) -> LayerScheme | None:
    changes: Mapping[str, Settings] = settings.get("extra_config") or {}
    changed = next((item for name, item in changes.items() if is_listed(path, (name,))), {})
    # AWQ stores the zero points of symmetric weights too.
    zeros = {"sym": False} if "awq" in _packing_format(settings) else {}
    return _gptq_scheme({**settings, **changed, **zeros}, path)


def _bitsandbytes_scheme(settings: Settings, path: str) -> LayerScheme | None:
    is_dense = _is_head(path) or is_listed(path, _listed(settings, "llm_int8_skip_modules"))
    return LayerScheme("int8") if settings.get("load_in_8bit") and not is_dense else None


def _torchao_scheme(settings: Settings, path: str) -> LayerScheme | None:
    kinds = [str((value or {}).get("_type")) for value in (settings.get("quant_type") or {}).values()]
    if _is_head(path) or is_listed(path, _listed(settings, "modules_to_not_convert")) or len(kinds) != 1:
        return None
    schemes = {"Int8WeightOnlyConfig": "int8", "Float8WeightOnlyConfig": "fp8_channel"}
    return LayerScheme(schemes[kinds[0]]) if kinds[0] in schemes else None


def _mxfp4_scheme(settings: Settings, path: str) -> LayerScheme | None:
    """Only the experts of gpt-oss are quantised."""
    is_stack = path.endswith(tuple(f".experts.{name}" for name in fp4_weights.EXPERT_WEIGHTS))
    return LayerScheme("mxfp4") if is_stack else None


def _gguf_scheme(settings: Settings, path: str) -> LayerScheme | None:
    scheme = settings["schemes"].get(path)
    return None if scheme is None else LayerScheme(scheme, gguf_weights.GROUP)


def _explicit_scheme(settings: Settings, path: str) -> LayerScheme | None:
    scheme = settings["schemes"].get(path)
    return None if scheme is None else LayerScheme(*scheme)


# Whether inputs of layers with FP8 weights are quantised too


def _fp8_method_has_fp8_inputs(settings: Settings) -> bool:
    return settings.get("activation_scheme", "dynamic") in ("dynamic", "static")


def _compressed_has_fp8_inputs(settings: Settings) -> bool:
    """True only if every group with FP8 weights asks for it, since a plan has one setting for all layers."""
    groups = [group for group in (settings.get("config_groups") or {}).values() if _is_fp8(group.get("weights"))]
    return bool(groups) and all(_is_fp8(group.get("input_activations")) for group in groups)


def _is_fp8(arguments: Mapping[str, Any] | None) -> bool:
    return arguments is not None and (arguments.get("type"), arguments.get("num_bits")) == ("float", 8)


def _model_optimizer_has_fp8_inputs(settings: Settings) -> bool:
    """Algorithms whose names end in WO quantise weights only."""
    layers = (settings.get("quantized_layers") or {}).values()
    algorithms = [str(part.get("quant_algo") or "") for part in (settings, *layers)]
    fp8_algorithms = [name for name in algorithms if name.startswith("FP8")]
    return bool(fp8_algorithms) and not any(name.endswith("_WO") for name in fp8_algorithms)


def _int4(dtype: str, group_size: int, has_zeros: bool, is_permuted: bool) -> LayerScheme:
    """The columns of a single group are always in order."""
    return LayerScheme(int4_scheme_name(dtype, has_zeros, is_permuted and group_size > 0), group_size)


def _group_size(settings: Mapping[str, Any]) -> int:
    """The columns that share a scale; 0 for a whole row, which most formats state as -1."""
    return max(int(settings.get("group_size") or 0), 0)


def _arguments(settings: Settings) -> Iterator[Mapping[str, Any]]:
    for group in (settings.get("config_groups") or {}).values():
        yield group.get("weights") or {}


def _block(size: Any) -> tuple[int, int] | None:
    """[128, 128], "[128, 128]" or "128x128" as rows and columns."""
    if not size:
        return None
    numbers = [int(word) for word in str(size).replace("x", " ").strip("[]()").replace(",", " ").split()]
    return (numbers[0], numbers[1])


def _listed(settings: Settings, *keys: str) -> tuple[str, ...]:
    return tuple(name for key in keys for name in settings.get(key) or ())


def _is_head(path: str) -> bool:
    return path.rpartition(".")[2] == "lm_head"


# By `quant_method`. Settings that change what a layer computes are refused.
METHODS: dict[str, Method] = {
    "fp8": Method(_find_fp8, _fp8_scheme, has_fp8_inputs=_fp8_method_has_fp8_inputs),
    "fbgemm_fp8": Method(_find_fp8, _fp8_scheme, has_fp8_inputs=lambda settings: True),
    "compressed-tensors": Method(_find_compressed, _compressed_scheme, has_fp8_inputs=_compressed_has_fp8_inputs),
    "modelopt": Method(_find_model_optimizer, _model_optimizer_scheme, has_fp8_inputs=_model_optimizer_has_fp8_inputs),
    "gptq": Method(_find_gptq, _gptq_scheme, has_negative_scales=True),
    "awq": Method(_find_awq, _awq_scheme),
    **dict.fromkeys(
        ("auto-round", "intel/auto-round"), Method(_find_auto_round, _auto_round_scheme, has_negative_scales=True)
    ),
    "mxfp4": Method(_find_mxfp4, _mxfp4_scheme, names_stacks=True),
    "bitsandbytes": Method(_find_bitsandbytes, _bitsandbytes_scheme),
    "torchao": Method(_find_torchao, _torchao_scheme),
    "gguf": Method(_find_gguf, _gguf_scheme, names_stacks=True),
    EXPLICIT: Method(
        lambda settings, layer: {},
        _explicit_scheme,
        has_fp8_inputs=lambda settings: settings["fp8_inputs"],
        names_stacks=True,
    ),  # fmt: skip
}
UNSUPPORTED_SETTINGS = {"compressed-tensors": ("transform_config",)}
