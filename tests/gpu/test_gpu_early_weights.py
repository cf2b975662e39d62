"""A model from early weights on a GPU equals one from its files, and allocates no more memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tcdeploy.models.load import load_model
from tcdeploy.models.weights.early_weights import start_reading
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.prepare import prepare
from tcdeploy.start.record.factors import weight_files
from tests.models.test_early_weights import describe, plan_of, save_model

pytestmark = pytest.mark.gpu
ALIGNMENT_BYTES = 512  # of torch's allocator


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "gpt2", "mixtral", "gpt_oss"])
def test_the_model_equals_one_from_the_files_and_takes_its_own_size(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path, torch.bfloat16)
    plan, config = plan_of(folder, "bfloat16"), AutoConfig.from_pretrained(folder)
    plan.device = "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated()
    early = start_reading(Recipe(model=str(folder)), folder, weight_files(folder))
    assert early is not None
    with early:
        model = load_model(plan, config, "eager", early)
        assert early.weights_read is not None
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in tensors_of(model)}
    assert {item.device.type for item in tensors_of(model)} == {"cuda"}
    assert torch.cuda.memory_allocated() - before == sum(
        -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for num_bytes in storages.values()
    )
    assert describe(model) == describe(load_model(plan, config, "eager"))


def tensors_of(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def test_a_start_reports_the_speed_of_reading(cache_dir: str) -> None:
    recipe = Recipe(
        model="builtin:tiny", buckets=(32,), batch_sizes=(1,), kv_blocks=64, context=256, cache_dir=cache_dir
    )
    deployment = prepare(recipe)
    assert deployment.weights_read is not None and deployment.weights_read.gb_per_second > 0
