"""The tensors that layers keep between steps, allocated once, and the objects through which modules find them.

    AttentionSpec   K and V, each [blocks, block_size, kv_heads, dim]; block 0 is for padding tokens
    SlotState       each of its tensors as [slots + snapshots, *shape of one sequence]; slot 0 is the scratch slot
    NoState         none

No sequence uses block 0 or slot 0: padding writes there, so nothing downstream needs a special case for padding. K and
V are separate tensors: with slices of one packed tensor, Inductor copied parts of it. The first dimension is dynamic
for torch.compile, so programs do not depend on the memory size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tcdeploy.errors import SpaceError
from tcdeploy.kernels.attention.metadata import StepHolder
from tcdeploy.kernels.state.mechanism import Mechanism
from tcdeploy.planning.architecture import Architecture, AttentionSpec, LayerState, SlotState
from tcdeploy.planning.plan import Plan
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic

StateTensors: TypeAlias = tuple[Tensor, ...]  # of one LayerState, in the order of its `tensor_names`


@dataclass
class LayerBinding:
    """What a module that keeps state carries as its attribute `tcdeploy`. `mechanism`: of a SlotState."""

    state: StateTensors
    step_holder: StepHolder
    mechanism: Mechanism | None = None


def allocate_state(plan: Plan, architecture: Architecture) -> list[StateTensors]:
    """The zeroed tensors of each LayerState, on the plan's device. Raises SpaceError if they do not fit."""
    try:
        _reserve(plan)
        return [_allocate(plan, state) for state in architecture.layer_states]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        size = f"{plan.kv_blocks} KV blocks ({plan.kv_bytes / 2**30:.1f} GiB)"
        if plan.slots:
            size += f" and {plan.slots + plan.snapshots} state slots ({plan.slot_bytes / 2**30:.1f} GiB)"
        raise SpaceError(
            f"{size} do not fit into the free memory",
            "free GPU memory (nvidia-smi lists the processes that use it), or lower --memory-fraction",
        ) from error


def named_state(architecture: Architecture, tensors: Sequence[StateTensors]) -> dict[str, Tensor]:
    """The tensors of all layers by their names in a step program."""
    return {
        name: tensor
        for names, of_state in zip(state_names(architecture), tensors, strict=True)
        for name, tensor in zip(names, of_state, strict=True)
    }


def state_names(architecture: Architecture) -> list[list[str]]:
    """The names of the tensors of each LayerState in a step program: `state/3/k` is K of the fourth."""
    return [
        [f"state/{number}/{name}" for name in state.tensor_names]
        for number, state in enumerate(architecture.layer_states)
    ]


def slot_tensors(architecture: Architecture, tensors: Sequence[StateTensors]) -> list[Tensor]:
    """The tensors of all layers whose first dimension is the slot."""
    states = zip(architecture.layer_states, tensors, strict=True)
    return [tensor for state, of_layer in states if isinstance(state, SlotState) for tensor in of_layer]


def _reserve(plan: Plan) -> None:
    """On a GPU, let torch's allocator get the memory of all layers in one call of the driver, and keep it.

    64 calls took about 0.1 s, because other threads of a start use the driver at the same time.
    """
    if plan.device == "cuda":
        torch.empty(plan.state_bytes, dtype=torch.uint8, device=plan.device)


def _allocate(plan: Plan, state: LayerState) -> StateTensors:
    if isinstance(state, AttentionSpec):
        block = (plan.kv_blocks, plan.block_size, state.kv_heads)
        return tuple(_zeros((*block, dim), plan.kv_dtype, plan.device) for dim in (state.head_dim, state.v_head_dim))
    if isinstance(state, SlotState):
        return tuple(
            _zeros((plan.slots + plan.snapshots, *tensor.shape), tensor.dtype or plan.compute_dtype, plan.device)
            for tensor in state.tensors
        )
    return ()


def _zeros(shape: tuple[int, ...], dtype: str, device: str) -> Tensor:
    tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
    mark_dynamic(tensor, 0)
    return tensor
