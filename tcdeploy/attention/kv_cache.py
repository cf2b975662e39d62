"""The paged KV cache: one K and one V tensor per layer, cut into blocks of `block_size` slots.

K and V stay separate tensors per layer: slices of one packed tensor made Inductor copy parts of it. Block 0 belongs
to no sequence: padding tokens write there, so nothing downstream has a special case for padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor

from tcdeploy.errors import SpaceError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.plan import Plan

PADDING_SLOT = 0


class LayerKV(NamedTuple):
    k: Tensor  # [blocks, block_size, kv_heads, head_dim]
    v: Tensor  # [blocks, block_size, kv_heads, v_head_dim]


def allocate_kv_cache(plan: Plan, architecture: Architecture) -> list[LayerKV]:
    """Zeroed K and V for every attention block, on the plan's device. Raises SpaceError when they do not fit."""
    try:
        return [
            LayerKV(_zeros(plan, spec.kv_heads, spec.head_dim), _zeros(plan, spec.kv_heads, spec.v_head_dim))
            for spec in architecture.attention_layers
        ]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise SpaceError(
            f"{plan.kv_blocks} KV blocks ({plan.kv_bytes / 2**30:.1f} GiB) do not fit into the free memory",
            "free the GPU (nvidia-smi shows who holds it), or lower --memory-fraction",
        ) from error


def _zeros(plan: Plan, heads: int, dim: int) -> Tensor:
    """Its number of blocks is a symbol to torch.compile: programs do not depend on how much memory a machine has."""
    cache = torch.zeros(
        plan.kv_blocks, plan.block_size, heads, dim, dtype=getattr(torch, plan.kv_dtype), device=plan.device
    )
    torch._dynamo.mark_dynamic(cache, 0)
    return cache
