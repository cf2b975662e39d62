"""Quantised experts. gpt-oss stores all experts of a layer in one tensor; other models store tensors per expert.

gpt-oss (`quant_method` "mxfp4"): mlp.experts.gate_up_proj_blocks U8 [experts, 2 * intermediate, hidden / 32, 16] and
gate_up_proj_scales U8 [experts, 2 * intermediate, hidden / 32] replace the dense gate_up_proj [experts, hidden,
2 * intermediate]: the stored matrix is transposed, its rows are outputs. down_proj_blocks [experts, hidden,
intermediate / 32, 16] likewise. Two FP4 codes per byte, the first in the low nibble; scales are E8M0. Rows of gate and
up alternate, in the dense weight as well. gate_up_proj_bias [experts, 2 * intermediate] and down_proj_bias stay in
BF16. All else is dense: `modules_to_not_convert` is ["model.layers.*.self_attn", "model.layers.*.mlp.router",
"model.embed_tokens", "lm_head"].

In other models each expert is three linear layers, such as model.layers.1.mlp.experts.3.gate_proj, which are stored
like all layers of the format: weight and weight_scale_inv of FP8, weight_packed, weight_scale and weight_shape of
compressed-tensors, qweight, qzeros, scales and g_idx of GPTQ. Scales of gate and up differ, and those of experts.
Routers (mlp.gate) stay dense, by the list of the config: by path in FP8 Qwen3-MoE and in older compressed-tensors
files, by "re:.*mlp.gate$" in newer ones; not listed in DeepSeek-V3, whose router is no linear module. Its
shared_experts are quantised.

transformers 5.23 is no reference for all of these: it drops weight_global_scale of NVFP4 experts, does not read MXFP4
experts of compressed-tensors, and refuses FP8 blocks at an edge (576 rows of DeepSeek). compressed-tensors reads them.

Established from openai/gpt-oss-20b's config and tensor names as quoted in public repositories, transformers 5.23's
integrations/mxfp4.py (the tool that the values are compared with) and conversion_mapping.py, and
llm-compressor's examples for MoE models.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tests.formats import compressed, fp8, int_packed, modelopt
from tests.formats.checkpoint import Format, Stored
from tests.formats.compressed import GROUP_INT4, MXFP4, NVFP4, config, group
from tests.formats.number_formats import e2m1, e8m0, to_mxfp4

LAYERS = 2
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


class Case(NamedTuple):
    """A format, and the family of a model that is published in it."""

    family: str
    form: Format


def store_gpt_oss(name: str, tensor: Tensor) -> Stored | None:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    stored = to_mxfp4(tensor.transpose(1, 2))
    tensors = {f"{name}_blocks": stored.packed.unflatten(-1, (-1, 16)), f"{name}_scales": stored.scale}
    return Stored(tensors, {name: stored.weight.transpose(1, 2).contiguous()})


def gpt_oss_value_at(blocks: Tensor, scales: Tensor, expert: int, row: int, column: int) -> float:
    """One element of the dense weight [experts, inputs, outputs]; `row` is an input."""
    group, place = divmod(row, 32)
    code = blocks[expert, column, group, place // 2].item() >> 4 * (place % 2) & 15
    return e2m1(code) * e8m0(scales[expert, column, group].item())


ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)]
NVFP4_INPUTS = {**NVFP4, "dynamic": "local"}

CASES: dict[str, Case] = {
    "gpt-oss": Case("gpt_oss", Format(GPT_OSS, store_gpt_oss)),
    "fp8 qwen3": Case("qwen3_moe", fp8.FORMATS["qwen3"]),
    "fp8 deepseek": Case("deepseek_v3", fp8.FORMATS["deepseek"]),
    "int4": Case(
        "qwen3_moe", compressed.compressed(config("pack-quantized", group(GROUP_INT4), ignore=["lm_head", *ROUTERS]))
    ),
    "nvfp4": Case(
        "qwen3_moe",
        compressed.compressed(
            config("nvfp4-pack-quantized", group(NVFP4, NVFP4_INPUTS), ignore=["re:.*lm_head", "re:.*mlp.gate$"])
        ),
    ),
    "mxfp4 experts only": Case(
        "deepseek_v3",
        compressed.compressed(
            config(
                "mxfp4-pack-quantized",
                group(MXFP4),
                ignore=[
                    "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
                    "re:.*lm_head.*",
                ],
            )
        ),
    ),
    "modelopt nvfp4": Case(
        "qwen3_moe", modelopt.modelopt("NVFP4", exclude_modules=["lm_head", "model.layers.*.mlp.gate"])
    ),
    "gptq": Case("qwen3_moe", int_packed.gptq(dynamic={r"-:.*mlp\.gate$": {}}, desc_act=True)),
    "awq": Case("qwen3_moe", int_packed.awq(modules_to_not_convert=["mlp.gate", "lm_head"])),
}  # fmt: skip
