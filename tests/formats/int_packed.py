"""GPTQ, AWQ and AutoRound: integers of 2 to 8 bits in int32 words, transposed: inputs are rows.

For a dense weight [n, k] and groups of g inputs, value = (code - zero) * scale:

GPTQ (`quant_method` "gptq"; the same settings in quantize_config.json): qweight I32 [k * bits / 32, n], packed along
the inputs, the first in the lowest bits; qzeros I32 [k / g, n * bits / 32], packed along the outputs; scales F16
[k / g, n]; g_idx I32 [k], the group of each input. Codes of 3 bits are a stream: some lie across two words.
`group_size` -1: one group.
- `desc_act` true: groups follow the order of activations, and g_idx is a permutation of groups. Inputs stay in their
  places. False: g_idx is 0, 0, ..., 1, 1, ..., and some tools leave it out.
- `checkpoint_format` "gptq" (or absent, older files): qzeros hold zero - 1, the reader adds one. "gptq_v2": they hold
  the zero. A symmetric weight of 4 bits has 7 in every nibble of v1 (0x77777777), 8 in v2. v1 cannot hold the zero 0:
  what AutoGPTQ wrote then borrows from the next code, so none is written here.
- `dynamic` (GPTQModel): regular expressions that match a path from its start (`re.match`), the first that matches wins;
  "-:" in front: the layer is dense; "+:" or nothing: overrides of bits, group_size, sym, desc_act.
- `lm_head` true: lm_head is quantised too. `modules_in_block_to_quantize` (optimum): only these parts of a block are.
- Models of AutoGPTQ have a `bias` F16 [n] of zeros beside each layer although the dense model has none.

AWQ (`quant_method` "awq", `version` "gemm", `zero_point` true, `bits` 4): qweight I32 [k, n / 8], packed along the
OUTPUTS in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits; qzeros I32 [k / g, n / 8] in the same order, not minus
one; scales F16 [k / g, n]. No g_idx. `modules_to_not_convert` has parts of paths, matched anywhere: null, ["lm_head"],
["visual"] (Qwen2.5-VL), ["vpm", "apm", "tts", "lm_head"] (MiniCPM-o), ["gate"] of MoE models, which by that rule takes
gate_proj too: whether a layer is quantised is better read from its tensors.

AutoRound (`quant_method` "auto-round", older "intel/auto-round"; `packing_format`): "auto_round:auto_gptq" is GPTQ v1,
"auto_round" (asymmetric, older) and "auto_round:gptqmodel" have the zero itself as v2; g_idx only in the latter.
"auto_round:auto_awq" is AWQ. `extra_config` maps the path of a layer, or a regular expression that is searched for in
paths, to what differs: {"bits": 8, "group_size": 32}, {"bits": 16, "data_type": "float"} for a dense one, also for
modules that have no linear weight. A path wins over an expression. `block_name_to_quantize` "model.layers" says that
all else is dense; list or string, with the names of the model's modules ("model.language_model.layers").

Established from GPTQModel 7.7 (config.py, utils/model.py, qlinear/torch.py), auto-round 0.16.1 (export_to_autoround,
convert_model.py, auto_round_extension/torch), compressed-tensors 0.20.1's AutoAWQConverter, AutoAWQ, and configs quoted
in public repositories. The tools compared: auto-round's QuantLinear and dequantize_gemm, GPTQModel's TorchLinear, and
AutoAWQConverter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.formats.checkpoint import Format, StoredWeight, store_projections
from tests.formats.number_formats import IntegerWeight, code_at, pack_bits, to_integers

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each nibble of a word, from the lowest
SCALE_DTYPE = torch.float16


def round_weight(weight: Tensor, settings: Mapping[str, Any], lowest_zero: int) -> IntegerWeight:
    bits, size, columns = settings["bits"], settings["group_size"], weight.shape[1]
    groups = None
    if settings.get("desc_act"):
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        groups = order // (columns if size == -1 else size)
    integers = to_integers(weight, bits, size, settings["sym"], SCALE_DTYPE, groups)
    if lowest_zero == 0:
        return integers
    zeros = integers.zeros.clamp(min=lowest_zero)
    codes = integers.codes + (zeros - integers.zeros)[:, integers.groups]
    return integers._replace(zeros=zeros, codes=codes.clamp(max=2**bits - 1))


def store_gptq(settings: Mapping[str, Any], offset: int, has_g_idx: bool, weight: Tensor) -> StoredWeight:
    """`offset`: what qzeros hold less than the zero."""
    integers = round_weight(weight, settings, offset)
    bits = settings["bits"]
    tensors = {
        "qweight": pack_bits(integers.codes.T, bits, 0),
        "qzeros": pack_bits(integers.zeros.T - offset, bits, 1),
        "scales": integers.scales.T.contiguous(),
    }
    if has_g_idx:
        tensors["g_idx"] = integers.groups.to(torch.int32)
    return StoredWeight(tensors, integers.weight)


def store_awq(settings: Mapping[str, Any], weight: Tensor) -> StoredWeight:
    integers = round_weight(weight, settings, 0)
    codes, zeros = (
        item.T.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1) for item in (integers.codes, integers.zeros)
    )
    tensors = {
        "qweight": pack_bits(codes, 4, 1),
        "qzeros": pack_bits(zeros, 4, 1),
        "scales": integers.scales.T.contiguous(),
    }
    return StoredWeight(tensors, integers.weight)


def gptq_settings(settings: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    """The settings of a layer after `dynamic`; None if it stays dense."""
    for pattern, changes in settings.get("dynamic", {}).items():
        sign, expression = (pattern[0], pattern[2:]) if pattern[:2] in ("+:", "-:") else ("+", pattern)
        if re.match(expression, path):
            return None if sign == "-" else {**settings, **changes}
    return settings


def auto_round_settings(settings: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    """The settings of a layer after `extra_config`; None if it stays dense."""
    extra = settings.get("extra_config", {})
    names = [path] if path in extra else [name for name in extra if re.search(name, path)]
    changed = {**settings, **(extra[names[0]] if names else {})}
    return changed if changed["bits"] <= 8 else None


def store_gptq_layer(settings: Mapping[str, Any], options: Any, path: str, weight: Tensor) -> StoredWeight | None:
    changed = gptq_settings(settings, path)
    if changed is None:
        return None
    stored = store_gptq(changed, int(settings.get("checkpoint_format") != "gptq_v2"), options["has_g_idx"], weight)
    if options["has_bias"]:
        stored.tensors["bias"] = torch.zeros(len(weight), dtype=torch.float16)
    return stored


def store_awq_layer(settings: Mapping[str, Any], path: str, weight: Tensor) -> StoredWeight | None:
    if any(name in path for name in settings["modules_to_not_convert"] or ()):
        return None
    return store_awq({**settings, "sym": not settings["zero_point"]}, weight)


def store_auto_round_layer(settings: Mapping[str, Any], path: str, weight: Tensor) -> StoredWeight | None:
    changed = auto_round_settings(settings, path)
    if changed is None:
        return None
    packing = settings["packing_format"]
    if packing.endswith("awq"):
        return store_awq(changed, weight)
    return store_gptq(changed, int(packing == "auto_round:auto_gptq"), packing == "auto_round:gptqmodel", weight)


def value_at(settings: Mapping[str, Any], tensors: dict[str, Tensor], row: int, column: int) -> float:
    """One element of the dense weight, for the settings of its layer; `row` is an output, `column` an input."""
    bits, groups = settings["bits"], len(tensors["scales"])
    is_awq = settings["quant_method"] == "awq" or settings.get("packing_format", "").endswith("awq")
    if is_awq:
        columns = len(tensors["qweight"])
        group, place = column * groups // columns, row - row % 8 + AWQ_ORDER.index(row % 8)
        code = code_at(tensors["qweight"][column].tolist(), place, 4)
        zero = code_at(tensors["qzeros"][group].tolist(), place, 4)
    else:
        columns = len(tensors["qweight"]) * 32 // bits
        group = tensors["g_idx"][column].item() if "g_idx" in tensors else column * groups // columns
        code = code_at(tensors["qweight"][:, row].tolist(), column, bits)
        has_zeros = settings.get("checkpoint_format") == "gptq_v2"
        has_zeros |= settings.get("packing_format") in ("auto_round", "auto_round:gptqmodel")
        zero = code_at(tensors["qzeros"][group].tolist(), row, bits) + (not has_zeros)
    return (code - zero) * tensors["scales"][group, row].item()


def gptq(has_g_idx: bool = True, has_bias: bool = False, **changes: Any) -> Format:
    settings = {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False,
        "checkpoint_format": "gptq", "damp_percent": 0.01, "true_sequential": True, "static_groups": False,
        "model_name_or_path": None, "model_file_base_name": "model", **changes,
    }  # fmt: skip
    options = {"has_g_idx": has_g_idx, "has_bias": has_bias}
    store = store_projections(partial(store_gptq_layer, settings, options))
    return Format(settings, store, files={"quantize_config.json": settings})


def awq(**changes: Any) -> Format:
    settings = {
        "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None, **changes,
    }  # fmt: skip
    return Format(settings, store_projections(partial(store_awq_layer, settings)))


def auto_round(packing_format: str, **changes: Any) -> Format:
    settings = {
        "quant_method": "auto-round", "packing_format": packing_format, "bits": 4, "group_size": 128, "sym": True,
        "data_type": "int", "iters": 200, "autoround_version": "0.9.0", "block_name_to_quantize": "model.layers",
        **changes,
    }  # fmt: skip
    return Format(settings, store_projections(partial(store_auto_round_layer, settings)))


def extra_config(names: Iterable[str]) -> dict[str, Any]:
    """Layers of 8 bits, a dense layer, and entries without a linear weight."""
    dense = {"bits": 16, "data_type": "float"}
    return {
        r".*layers\.1\.self_attn.*": {"group_size": 32},
        **dict.fromkeys(("lm_head", "model.norm", "model.layers.0.input_layernorm", *names), dense),
        "model.layers.1.self_attn.q_proj": {"bits": 8},
    }


DYNAMIC = {
    r"-:.*layers\.0\.self_attn\.o_proj": {},
    r"+:.*layers\.1\..*down_proj": {"bits": 8, "group_size": 64},
    r".*layers\.1\.mlp.*": {"group_size": 32},
}

FORMATS: dict[str, Format] = {
    "gptq": gptq(),
    "gptq act order": gptq(desc_act=True),
    "gptq asymmetric": gptq(sym=False),
    "gptq asymmetric act order": gptq(sym=False, desc_act=True, group_size=32),
    "gptq without g_idx": gptq(has_g_idx=False),
    "gptq with bias": gptq(has_bias=True),
    "gptq one group": gptq(group_size=-1),
    "gptq 8": gptq(bits=8),
    "gptq 8 asymmetric": gptq(bits=8, sym=False, group_size=32),
    "gptq 3": gptq(bits=3),
    "gptq 2 asymmetric": gptq(bits=2, sym=False, group_size=32),
    "gptq v2": gptq(checkpoint_format="gptq_v2"),
    "gptq v2 asymmetric": gptq(checkpoint_format="gptq_v2", sym=False, desc_act=True),
    "gptq dynamic": gptq(dynamic=DYNAMIC),
    "awq": awq(),
    "awq group 32": awq(group_size=32, modules_to_not_convert=["layers.1.mlp", "lm_head"]),
    "auto-round": auto_round("auto_round:auto_gptq", extra_config=extra_config(["model.layers.0.mlp.down_proj"])),
    "auto-round asymmetric": auto_round("auto_round", sym=False, group_size=32),
    "auto-round gptqmodel": auto_round("auto_round:gptqmodel", sym=False),
    "auto-round awq": auto_round("auto_round:auto_awq", sym=False),
}
