"""bitsandbytes as transformers saves it (unsloth/*-bnb-4bit): codes of 4 bits into a table, or int8 with row maxima.

config.json: `quant_method` "bitsandbytes", load_in_4bit or load_in_8bit, bnb_4bit_quant_type "nf4" or "fp4",
bnb_4bit_use_double_quant, bnb_4bit_compute_dtype, `llm_int8_skip_modules` (paths, parents, or last parts; null: lm_head
only; unsloth's dynamic files list several projections by path, ["lm_head", "model.visual", "mtp"] of others).

Tensors beside a layer's path, for a weight [n, k]:

- 4 bits: weight U8 [n * k / 2, 1], all rows as one sequence, the first value in the HIGH nibble;
  weight.quant_map F32 [16], the table; weight.absmax F32 [ceil(n * k / 64)], one per 64 consecutive values, across the
  ends of rows; weight.quant_state.bitsandbytes__nf4 U8 [length], JSON text: {"quant_type", "blocksize", "dtype",
  "shape"}. Value = table[code] * absmax[index // blocksize]. The suffix names the type: ...__fp4.
- Nested (double quantisation): weight.absmax U8 codes; weight.nested_quant_map F32 [256]; weight.nested_absmax F32
  [ceil(blocks / 256)]; the JSON has nested_blocksize 256, nested_dtype "float32", nested_offset.
  absmax = nested_quant_map[code] * nested_absmax[block // 256] + nested_offset.
- FP4 is no E2M1: the table in the order of codes is 0, 0.0625, 8, 12, 4, 6, 2, 3 and their negatives, divided by 12.
- int8: weight I8 [n, k], SCB F32 [n] beside the weight (not weight.SCB), weight_format U8 [], which is 0.
  Value = weight * SCB / 127.

Established by saving a model with transformers 5.23 and bitsandbytes 0.50.2 on the CPU; the tool reads what is written
here. Experts of transformers 5, which are one parameter, stay dense there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.formats.checkpoint import Format, StoredWeight, store_projections
from tests.formats.fp8 import is_listed

BLOCK = 64
NESTED_BLOCK = 256
NF4 = (  # quantiles of a normal distribution (QLoRA, appendix E)
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_SIZES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
TABLES = {"nf4": torch.tensor(NF4), "fp4": torch.tensor([*FP4_SIZES, *(-size for size in FP4_SIZES)]) / 12}


def nested_table() -> Tensor:
    """256 values in -1..1: seven decades, each twice as finely divided as the one below it, and 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        borders = torch.linspace(0.1, 1, 2**decade + 1)
        sizes = 10.0 ** (decade - 6) * (borders[:-1] + borders[1:]) / 2
        values += [*sizes.tolist(), *(-sizes).tolist()]
    return torch.tensor(sorted(values))


def nearest(values: Tensor, table: Tensor) -> Tensor:
    return (values[..., None] - table).abs().argmin(-1)


def store_4_bits(kind: str, is_nested: bool, weight: Tensor) -> StoredWeight:
    values = weight.flatten()
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    absmax = blocks.abs().amax(1).clamp(min=1e-12)
    codes = nearest(blocks / absmax[:, None], TABLES[kind]).flatten()[: len(values)].to(torch.uint8)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "weight.quant_map": TABLES[kind].clone()}
    if is_nested:
        offset, table = absmax.mean().item(), nested_table()
        groups = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
        nested = groups.abs().amax(1).clamp(min=1e-12)
        nested_codes = nearest(groups / nested[:, None], table).flatten()[: len(absmax)]
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.absmax": nested_codes.to(torch.uint8), "weight.nested_absmax": nested}
        tensors["weight.nested_quant_map"] = table
        absmax = table[nested_codes] * nested.repeat_interleave(NESTED_BLOCK)[: len(absmax)] + offset
    else:
        tensors["weight.absmax"] = absmax
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    dense = TABLES[kind][codes.long()] * absmax.repeat_interleave(BLOCK)[: len(values)]
    return StoredWeight(tensors, dense.view(weight.shape))


def store_int8(weight: Tensor) -> StoredWeight:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return StoredWeight(tensors, codes.float() * (largest[:, None] / 127))


def store(settings: Mapping[str, Any], path: str, weight: Tensor) -> StoredWeight | None:
    if is_listed(settings["llm_int8_skip_modules"] or ("lm_head",), path):
        return None
    if settings["load_in_8bit"]:
        return store_int8(weight)
    return store_4_bits(settings["bnb_4bit_quant_type"], settings["bnb_4bit_use_double_quant"], weight)


def value_at(tensors: dict[str, Tensor], row: int, column: int) -> float:
    """One element of the dense weight."""
    if "SCB" in tensors:
        return tensors["weight"][row, column].item() * tensors["SCB"][row].item() / 127
    [text] = [item for name, item in tensors.items() if ".quant_state." in name]
    state = json.loads(bytes(text.tolist()))
    place = row * state["shape"][1] + column
    code = tensors["weight"][place // 2, 0].item() >> (0 if place % 2 else 4) & 15
    block = place // state["blocksize"]
    absmax = tensors["weight.absmax"][block].item()
    if "nested_offset" in state:
        nested = tensors["weight.nested_absmax"][block // state["nested_blocksize"]].item()
        absmax = tensors["weight.nested_quant_map"][absmax].item() * nested + state["nested_offset"]
    return tensors["weight.quant_map"][code].item() * absmax


def bitsandbytes(bits: int, kind: str = "fp4", is_nested: bool = False, skipped: list[str] | None = None) -> Format:
    settings = {
        "quant_method": "bitsandbytes", "_load_in_4bit": bits == 4, "_load_in_8bit": bits == 8,
        "load_in_4bit": bits == 4, "load_in_8bit": bits == 8, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": is_nested,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": skipped, "llm_int8_threshold": 6.0,
    }  # fmt: skip
    return Format(settings, store_projections(partial(store, settings)))


FORMATS: dict[str, Format] = {
    "nf4": bitsandbytes(4, "nf4"),
    "nf4 nested": bitsandbytes(4, "nf4", True, ["lm_head", "model.layers.0.self_attn", "model.layers.1.mlp.up_proj"]),
    "fp4": bitsandbytes(4, "fp4"),
    "int8": bitsandbytes(8),
}
