"""FP8 checkpoints of `quant_method` "fp8" and "fbgemm_fp8": DeepSeek, Qwen3, MiniMax, Ministral, AutoFP8, Llama 405B.

The name "fp8" covers four layouts, which differ in `weight_block_size` and in the shape of the scale. In each, weight
is F8_E4M3 [n, k], and the value is weight * scale. The name `weight_scale_inv` suggests a divisor, but it multiplies.

- Blocks (DeepSeek-V3, Qwen3-FP8, MiniMax-M2): `weight_block_size` [128, 128]; weight_scale_inv
  [ceil(n / 128), ceil(k / 128)], F32 in DeepSeek and MiniMax, BF16 in Qwen. Blocks at the edges are smaller (DeepSeek's
  kv_a_proj_with_mqa has 576 rows). `activation_scheme` is "dynamic", and `fmt` "e4m3" ("float8_e4m3fn" in MiniMax).
- `scale_fmt` "ue8m0" says that scales are powers of two: F32 still in DeepSeek-V3.1, F8_E8M0 in V4. transformers also
  reads U8 as E8M0. A reader goes by the dtype, not by the key.
- Whole tensors (Ministral 3, Devstral 2): `weight_block_size` null, `activation_scheme` "static"; weight_scale_inv []
  and activation_scale [], both BF16.
- AutoFP8 (neuralmagic's older models, databricks): `weight_scale` F32 [] and, if `activation_scheme` is "static",
  `input_scale` F32 []; no `weight_block_size`.
- fbgemm_fp8 (Llama-3.1-405B-Instruct-FP8): weight_scale F32 [n, 1]; `activation_scale_ub` in the config. A tensor
  input_scale_ub F32 [1] per layer is written here too: no public file was found with it, but a reader must ignore it.

Which layers are dense: DeepSeek lists none (embeddings, lm_head, norms and routers are). Qwen3 lists every dense module
by its path in `modules_to_not_convert`, norms included ("lm_head", "model.layers.0.input_layernorm",
"model.layers.0.mlp.gate"). MiniMax has last parts of paths ("gate", "e_score_correction_bias", "lm_head"). Ministral
has parents ("model.vision_tower", "model.multi_modal_projector", "lm_head"). AutoFP8 calls the list `ignored_layers`
(full paths). fbgemm_fp8 lists projections by path. transformers takes an entry as a regular expression that matches
from the start up to a dot, or as the end of a path, of "shared_expert_gate" too: "gate" is not the end of "gate_proj".

Established from transformers 5.23 (integrations/finegrained_fp8.py, utils/quantization_config.py), compressed-tensors'
FP8BlockDequantizer, vLLM's fp8.py and fbgemm_fp8.py, neuralmagic/AutoFP8, and configs quoted in public repositories.
The tools: transformers' Fp8Dequantize, which needs blocks that divide the weight evenly, and FP8BlockDequantizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.formats.checkpoint import Format, StoredWeight, scalar, store_projections
from tests.formats.number_formats import e4m3, e8m0, powers_of_two, to_fp8_blocks

BLOCK = 128


class Layout(NamedTuple):
    """`block`: rows and columns that share a scale, 0 for all. `shape`: of a scale, None for its rows and columns."""

    block: tuple[int, int]
    scale_name: str
    store_scale: Callable[[Tensor], Tensor]
    shape: tuple[int, ...] | None = None
    extra: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = {}


def is_listed(names: Iterable[str], path: str) -> bool:
    """Whether a path is one of the names, is below one, or ends in one, inside of a part too."""
    return any(f"{path}.".startswith(f"{name}.") or path.endswith(name) for name in names)


def store(settings: Mapping[str, Any], layout: Layout, path: str, weight: Tensor) -> StoredWeight | None:
    names = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ()
    if is_listed(names, path):
        return None
    height, width = (size or full for size, full in zip(layout.block, weight.shape, strict=True))
    stored = to_fp8_blocks(weight, height, width, layout.store_scale)
    scale = stored.scale if layout.shape is None else stored.scale.view(layout.shape)
    extra = {name: scalar(f"{path}.{name}", *kind) for name, kind in layout.extra.items()}
    return StoredWeight({"weight": stored.codes, layout.scale_name: scale, **extra}, stored.weight)


def value_at(tensors: dict[str, Tensor], row: int, column: int) -> float:
    """One element of the dense weight: the scale's shape says what shares it."""
    [name] = tensors.keys() & {"weight_scale_inv", "weight_scale"}
    scale, columns = tensors[name], tensors["weight"].shape[1]
    if scale.dtype == torch.float8_e8m0fnu:
        scale = torch.tensor([[e8m0(code) for code in codes] for codes in scale.view(torch.uint8).tolist()])
    if scale.numel() > 1:
        is_per_row = scale.shape == (len(tensors["weight"]), 1) and columns > 1 and name == "weight_scale"
        scale = scale[row, 0] if is_per_row else scale[row // BLOCK, column // BLOCK]
    return e4m3(tensors["weight"].view(torch.uint8)[row, column].item()) * scale.item()


def fp8(layout: Layout, **settings: Any) -> Format:
    settings = {"quant_method": "fp8", **settings}
    return Format(settings, store_projections(partial(store, settings, layout)))


def dense_modules(layers: int) -> list[str]:
    """The list of Qwen3: every module with weights that stay dense. Here a projection too, in the last layer."""
    parts = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    names = [f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts]
    return ["lm_head", *names, f"model.layers.{layers - 1}.mlp.down_proj"]


def bfloat16(scale: Tensor) -> Tensor:
    return scale.to(torch.bfloat16)


DYNAMIC = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
BLOCKS = Layout((BLOCK, BLOCK), "weight_scale_inv", torch.clone)
POWERS = BLOCKS._replace(store_scale=powers_of_two)
TENSOR = Layout((0, 0), "weight_scale_inv", bfloat16, (), {"activation_scale": (torch.bfloat16, ())})
AUTO_FP8 = Layout((0, 0), "weight_scale", torch.clone, (), {"input_scale": (torch.float32, ())})
ROWS = Layout((1, 0), "weight_scale", torch.clone, None, {"input_scale_ub": (torch.float32, (1,))})

FORMATS: dict[str, Format] = {
    "deepseek": fp8(BLOCKS, **DYNAMIC),
    "deepseek ue8m0": fp8(POWERS, **DYNAMIC, scale_fmt="ue8m0"),
    "e8m0": fp8(
        BLOCKS._replace(store_scale=lambda scale: powers_of_two(scale).to(torch.float8_e8m0fnu)),
        **DYNAMIC,
        scale_fmt="ue8m0",
    ),
    "qwen3": fp8(BLOCKS._replace(store_scale=bfloat16), **DYNAMIC, modules_to_not_convert=dense_modules(2)),
    "minimax": fp8(
        BLOCKS,
        **{**DYNAMIC, "fmt": "float8_e4m3fn"},
        modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
    ),
    "ministral": fp8(
        TENSOR,
        activation_scheme="static",
        dequantize=False,
        weight_block_size=None,
        modules_to_not_convert=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    ),
    "autofp8 static": fp8(AUTO_FP8, activation_scheme="static", ignored_layers=["lm_head"]),
    "autofp8 dynamic": fp8(
        AUTO_FP8._replace(extra={}),
        activation_scheme="dynamic",
        ignored_layers=["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"],
    ),
    "fbgemm": fp8(
        ROWS,
        quant_method="fbgemm_fp8",
        activation_scale_ub=1200.0,
        modules_to_not_convert=["lm_head", *(f"model.layers.0.self_attn.{part}_proj" for part in "qkvo")],
    ),
}
