"""The paged KV cache: one K and one V tensor per layer, cut into blocks of `block_size` slots.

K and V stay separate tensors per layer: slices of one packed tensor made Inductor copy parts of it. Block 0 belongs
to no sequence: padding tokens write there, so nothing downstream has a special case for padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.architecture import Architecture
from tcdeploy.errors import SpaceError
from tcdeploy.plan import Plan

PADDING_SLOT = 0


class LayerKV(NamedTuple):
    k: Tensor  # [blocks, block_size, kv_heads, head_dim]
    v: Tensor  # [blocks, block_size, kv_heads, v_head_dim]


def allocate_kv_cache(plan: Plan, architecture: Architecture) -> list[LayerKV]:
    """Zeroed K and V for every attention block, on the plan's device. Raises SpaceError when they do not fit."""
    options = {"dtype": getattr(torch, plan.dtype), "device": plan.device}
    try:
        return [
            LayerKV(
                torch.zeros(plan.kv_blocks, plan.block_size, facts.kv_heads, facts.head_dim, **options),
                torch.zeros(plan.kv_blocks, plan.block_size, facts.kv_heads, facts.v_head_dim, **options),
            )
            for facts in architecture.attentions
        ]
    except torch.OutOfMemoryError as error:
        raise SpaceError(
            f"{plan.kv_blocks} KV blocks ({plan.kv_bytes / 2**30:.1f} GiB) do not fit into the GPU's free memory",
            "free the GPU (nvidia-smi shows who holds it), or lower --memory-fraction",
        ) from error
