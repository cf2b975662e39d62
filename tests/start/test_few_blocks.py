"""The recipe of a process that builds packages beside a server on a GPU: the server's plan, with few KV blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.planning.plan import make_plan
from tcdeploy.start.workers.parallel import few_blocks_recipe
from tests.machines import A10G, GEMMA_2_9B, H100, LLAMA_8B, QWEN3_32B, make_recipe


@pytest.mark.parametrize(
    ("environment", "architecture", "fields"),
    [
        (H100, LLAMA_8B, {}),
        (H100, LLAMA_8B, {"buckets": (512, 2048), "batch_sizes": (1, 8, 32)}),
        (H100, LLAMA_8B, {"context": 4096, "shapes": "dynamic"}),
        (H100, GEMMA_2_9B, {"graphs": "none"}),
        (H100, QWEN3_32B, {"context": 2048}),
        (A10G, LLAMA_8B, {"context": 1024, "mixed_steps": "off"}),
    ],
)
def test_its_packages_belong_to_the_plan_of_the_server(
    environment: Any, architecture: Any, fields: dict[str, Any]
) -> None:
    recipe = make_recipe(programs="aot", **fields)
    plan = make_plan(recipe, environment, architecture)
    prompts: Any = SimpleNamespace(blocks_needed=lambda bucket: 20)
    small_recipe = few_blocks_recipe(SimpleNamespace(plan=plan, recipe=recipe), prompts)  # type: ignore[arg-type]
    small = make_plan(small_recipe, environment, architecture)
    assert small.key == plan.key
    assert small.kv_bytes < plan.kv_bytes / 2
