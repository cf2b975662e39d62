"""The paged KV cache: one K and one V tensor per layer, divided into blocks of `block_size` slots.

K and V are separate tensors: with slices of one packed tensor, Inductor copied parts of it. No sequence uses block 0;
padding tokens write there, so nothing downstream needs a special case for padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.errors import SpaceError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.plan import Plan
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic

PADDING_SLOT = 0


class LayerKV(NamedTuple):
    k: Tensor  # [blocks, block_size, kv_heads, head_dim]
    v: Tensor  # [blocks, block_size, kv_heads, v_head_dim]


def allocate_kv_cache(plan: Plan, architecture: Architecture) -> list[LayerKV]:
    """Zeroed K and V of each attention layer, on the plan's device. Raises SpaceError if they do not fit."""
    try:
        _reserve(plan)
        return [
            LayerKV(_zeros(plan, spec.kv_heads, spec.head_dim), _zeros(plan, spec.kv_heads, spec.v_head_dim))
            for spec in architecture.attention_layers
        ]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise SpaceError(
            f"{plan.kv_blocks} KV blocks ({plan.kv_bytes / 2**30:.1f} GiB) do not fit into the free memory",
            "free GPU memory (nvidia-smi lists the processes that use it), or lower --memory-fraction",
        ) from error


def _reserve(plan: Plan) -> None:
    """On a GPU, let torch's allocator get the memory of all layers in one call of the driver, and keep it.

    64 calls took about 0.1 s, because other threads of a start use the driver at the same time.
    """
    if plan.device == "cuda":
        torch.empty(plan.kv_bytes, dtype=torch.uint8, device=plan.device)


def _zeros(plan: Plan, heads: int, dim: int) -> Tensor:
    """A zeroed cache whose block count is dynamic for torch.compile, so programs do not depend on the memory size."""
    shape = (plan.kv_blocks, plan.block_size, heads, dim)
    cache = torch.zeros(shape, dtype=getattr(torch, plan.kv_dtype), device=plan.device)
    mark_dynamic(cache, 0)
    return cache
