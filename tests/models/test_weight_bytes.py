"""The memory of weights is planned exactly: it equals the bytes of the loaded model's parameters and buffers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from tcdeploy.models.auto_classes import auto_class
from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.load_model import load_model
from tests.model_families import SHAPE_ONLY, SUPPORTED, probe

EXPERTS = {
    **SUPPORTED["qwen3"], "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "num_dense_layers": 1, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 3,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    **SUPPORTED,
    **SHAPE_ONLY,
    "dots1": EXPERTS,  # keeps a buffer in float32
    "ernie4_5_moe": EXPERTS,  # keeps routers in float32, and its code creates them so
    "afmoe": EXPERTS,  # keeps norms in float32, for float16 only
    "gemma3": {"text_config": SUPPORTED["gemma3_text"], "vision_config": VISION, "mm_tokens_per_image": 4},
}
DTYPES = ("float32", "bfloat16", "float16")


def load(folder: Path, config: Any, dtype: str, load_format: str = "auto") -> PreTrainedModel:
    plan: Any = SimpleNamespace(
        model=str(folder), revision=None, trust_remote_code=False, device="cpu", weight_dtype=dtype,
        load_format=load_format,
    )  # fmt: skip
    return load_model(plan, config, "eager", ())


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and buffers; each tied one once."""
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planned_bytes_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the family")
    config = AutoConfig.for_model(family, **FAMILIES[family])
    auto_class(config, trust_remote_code=False).from_config(config).save_pretrained(tmp_path)
    architecture = probe(config)
    for dtype in DTYPES:
        model = load(tmp_path, config, dtype)
        tensors = tensors_of(model)
        assert architecture.weight_bytes[dtype] == sum(tensor.nbytes for tensor in tensors.values()), dtype
        random_tensors = tensors_of(load(tmp_path, config, dtype, "dummy"))
        assert {name: tensor.dtype for name, tensor in random_tensors.items()} == {
            name: tensor.dtype for name, tensor in tensors.items()
        }, dtype
        pack_linears(model, architecture.packed_linears)
        assert architecture.weight_bytes[dtype] == sum(tensor.nbytes for tensor in tensors_of(model).values())


@pytest.mark.parametrize(
    ("family", "dtype", "kept"),
    [
        ("dots1", "bfloat16", "e_score_correction_bias"), ("dots1", "float16", "e_score_correction_bias"),
        ("gpt_oss", "float16", "norm.weight"), ("gpt_oss", "bfloat16", ""), ("llama", "float16", ""),
    ],
)  # fmt: skip
def test_random_weights_are_kept_in_float32_as_loaded_ones_are(
    family: str, dtype: str, kept: str, tmp_path: Path
) -> None:
    """A cache that CI has warmed with random weights contains the programs of real weights."""
    model = load(tmp_path, AutoConfig.for_model(family, **FAMILIES[family]), dtype, "dummy")
    names = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    assert names == {name for name in model.state_dict() if kept and kept in name}
