"""Weights that threads read to a GPU equal those that transformers loads, and allocate no more memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION
from tcdeploy.models.load_model import load_model
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.prepare import prepare
from tests.models.test_traced_model import describe, load_both, plan, save_model

pytestmark = pytest.mark.gpu
ALIGNMENT_BYTES = 512  # of torch's allocator


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=["copied", "converted"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "gpt2", "mixtral", "gpt_oss"])
def test_the_model_equals_that_of_transformers_and_takes_its_own_size(
    family: str, stored: torch.dtype, tmp_path: Path
) -> None:
    planned = plan(save_model(family, tmp_path, stored), device="cuda", dtype="bfloat16")
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, (), planned.traced_model)
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in tensors_of(model)}
    assert {item.device.type for item in tensors_of(model)} == {"cuda"}
    assert torch.cuda.memory_allocated() - before == sum(
        -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for num_bytes in storages.values()
    )
    expected, model = load_both(planned)
    assert describe(model) == describe(expected)


def tensors_of(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def test_a_start_reports_the_speed_of_reading(cache_dir: str) -> None:
    recipe = Recipe(
        model="builtin:tiny", buckets=(32,), batch_sizes=(1,), kv_blocks=64, context=256, cache_dir=cache_dir
    )
    deployment = prepare(recipe)
    assert deployment.weights_read is not None and deployment.weights_read.gb_per_second > 0
