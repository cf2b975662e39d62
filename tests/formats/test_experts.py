"""Checkpoints with quantised experts have the tensors of their format, and those of gpt-oss the values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.formats.checkpoint import random_weight, read_tensors, write_checkpoint, write_dense
from tests.formats.experts import CASES, gpt_oss_value_at, store_gpt_oss
from tests.formats.layers import Kind, layer_kinds, relative_error

NAME = "model.layers.0.mlp.experts.gate_up_proj"


def gpt_oss_tensors(dense: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and the weight that they stand for."""
    stored = store_gpt_oss(NAME, dense)
    assert stored is not None
    return stored.tensors[f"{NAME}_blocks"], stored.tensors[f"{NAME}_scales"], stored.dense[NAME]


def test_experts_of_gpt_oss_are_stored_as_defined_and_as_transformers_reads_them() -> None:
    dense = random_weight(3, 64, 20)
    blocks, scales, weight = gpt_oss_tensors(dense)
    assert (blocks.shape, scales.shape) == ((3, 20, 2, 16), (3, 20, 2))
    experts, rows, columns = map(range, dense.shape)
    values = [
        [[gpt_oss_value_at(blocks, scales, item, row, column) for column in columns] for row in rows]
        for item in experts
    ]
    assert torch.equal(torch.tensor(values), weight)
    assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), weight)
    assert 0.05 < relative_error(weight, dense) < 0.2


def test_a_wrong_reading_of_gpt_oss_changes_the_weight() -> None:
    blocks, scales, weight = gpt_oss_tensors(random_weight(3, 64, 64))
    for wrong in ((blocks >> 4 | blocks << 4, scales), (blocks, scales + 1), (blocks, scales.flip(2))):
        assert relative_error(convert_moe_packed_tensors(*wrong, dtype=torch.float32), weight) > 0.1
    assert relative_error(weight.transpose(1, 2), weight) > 0.1


EXPERT = "model.layers.1.mlp.experts.3.down_proj"  # [256, 128]
STORED: dict[str, dict[str, Kind]] = {
    "fp8 qwen3": {"weight": (torch.float8_e4m3fn, (256, 128)), "weight_scale_inv": (torch.bfloat16, (2, 1))},
    "fp8 deepseek": {"weight": (torch.float8_e4m3fn, (256, 128)), "weight_scale_inv": (torch.float32, (2, 1))},
    "int4": {
        "weight_packed": (torch.int32, (256, 16)), "weight_scale": (torch.bfloat16, (256, 1)),
        "weight_shape": (torch.int64, (2,)),
    },
    "nvfp4": {
        "weight_packed": (torch.uint8, (256, 64)), "weight_scale": (torch.float8_e4m3fn, (256, 8)),
        "weight_global_scale": (torch.float32, (1,)), "input_global_scale": (torch.float32, (1,)),
    },
    "mxfp4 experts only": {"weight_packed": (torch.uint8, (256, 64)), "weight_scale": (torch.uint8, (256, 4))},
    "modelopt nvfp4": {
        "weight": (torch.uint8, (256, 64)), "weight_scale": (torch.float8_e4m3fn, (256, 8)),
        "weight_scale_2": (torch.float32, ()), "input_scale": (torch.float32, ()),
    },
    "gptq": {
        "qweight": (torch.int32, (16, 256)), "qzeros": (torch.int32, (1, 32)), "scales": (torch.float16, (1, 256)),
        "g_idx": (torch.int32, (128,)),
    },
    "awq": {
        "qweight": (torch.int32, (128, 32)), "qzeros": (torch.int32, (1, 32)), "scales": (torch.float16, (1, 256)),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_folder_has_the_tensors_of_the_format(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    family, form = CASES[name]
    dense = write_checkpoint(form, sources[family], tmp_path / "stored")
    assert dense.keys() == read_tensors(sources[family]).keys()
    router = "router" if name == "gpt-oss" else "gate"
    assert layer_kinds(tmp_path / "stored", f"model.layers.1.mlp.{router}")["weight"][0] == torch.bfloat16
    if name != "gpt-oss":
        assert layer_kinds(tmp_path / "stored", EXPERT) == STORED[name]
        return
    kinds = layer_kinds(tmp_path / "stored", "model.layers.1.mlp.experts")
    assert kinds == {
        "down_proj_bias": (torch.bfloat16, (4, 256)),
        "down_proj_blocks": (torch.uint8, (4, 256, 12, 16)),
        "down_proj_scales": (torch.uint8, (4, 256, 12)),
        "gate_up_proj_bias": (torch.bfloat16, (4, 768)),
        "gate_up_proj_blocks": (torch.uint8, (4, 768, 8, 16)),
        "gate_up_proj_scales": (torch.uint8, (4, 768, 8)),
    }


def test_only_experts_are_quantised_where_all_else_is_ignored(sources: dict[str, Path], tmp_path: Path) -> None:
    write_checkpoint(CASES["mxfp4 experts only"].form, sources["deepseek_v3"], tmp_path / "stored")
    packed = {name for name in read_tensors(tmp_path / "stored") if name.endswith("weight_packed")}
    parts = ("gate_proj", "up_proj", "down_proj")
    assert packed == {f"model.layers.1.mlp.experts.{item}.{part}.weight_packed" for item in range(4) for part in parts}


def test_deepseek_has_blocks_at_the_edge(sources: dict[str, Path], tmp_path: Path) -> None:
    write_checkpoint(CASES["fp8 deepseek"].form, sources["deepseek_v3"], tmp_path / "stored")
    kinds = layer_kinds(tmp_path / "stored", "model.layers.0.self_attn.kv_a_proj_with_mqa")
    assert kinds["weight"][1] == (576, 256) and kinds["weight_scale_inv"][1] == (5, 2)


@pytest.mark.parametrize("name", ["gpt-oss", "fp8 qwen3"])
def test_transformers_loads_the_weights_that_the_dense_model_has(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """With its own renaming and merging of experts. It dequantises to bfloat16."""
    if name != "gpt-oss":
        pytest.importorskip("accelerate", reason="transformers' FP8 quantizer needs it")
    family, form = CASES[name]
    dense = write_checkpoint(form, sources[family], tmp_path / "stored")
    write_dense(sources[family], dense, tmp_path / "dense")
    settings = {"gpt-oss": Mxfp4Config, "fp8 qwen3": FineGrainedFP8Config}[name](dequantize=True)
    load = AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "stored", dtype=torch.bfloat16, quantization_config=settings)
    weights = load(tmp_path / "dense", dtype=torch.float32).state_dict()
    assert model.state_dict().keys() == weights.keys()
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(weight.float(), weights[key], rtol=2**-8, atol=0)
