"""How many KV blocks fit: arithmetic over sizes in bytes, without torch.

Weights first, then a reserve for what nobody can count beforehand, and KV takes what is left, but never more than the
largest batch at full context can use.
"""

from __future__ import annotations

from typing import NamedTuple

from tcdeploy.architecture import Architecture
from tcdeploy.environment import Environment
from tcdeploy.errors import SpaceError, UsageError
from tcdeploy.recipe import Recipe

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GPU_RESERVE_BYTES = 4 << 30  # CUDA context, cuBLAS and Inductor workspaces, graphs, the eager reference's activations
HOST_KV_FRACTION = 0.25


class Demand(NamedTuple):
    """What the buckets ask of the KV cache: tokens, sequences, slots per block."""

    context: int
    max_batch: int
    longest_prefill: int
    block_size: int


class KVSize(NamedTuple):
    """`context` is smaller than the demand's where memory ends first."""

    blocks: int
    kv_bytes: int
    weight_bytes: int
    context: int
    reason: str


def size_kv_cache(
    recipe: Recipe, environment: Environment, architecture: Architecture, device: str, dtype: str, demand: Demand
) -> KVSize:
    """One block more than the sequences need, for padding. Raises SpaceError when the buckets cannot be held."""
    weight_bytes = architecture.parameters * DTYPE_BYTES[dtype]
    block_bytes = architecture.kv_values_per_token * DTYPE_BYTES[dtype] * demand.block_size
    budget = _kv_budget(recipe, environment, device, weight_bytes)
    if budget < block_bytes:
        raise SpaceError(
            f"{gib(weight_bytes)} of {dtype} weights leave no room for KV: {_memory_name(recipe, environment, device)}",
            "a smaller model, a smaller --dtype, or more memory",
        )
    blocks, reason = _choose_blocks(recipe.kv_blocks, budget // block_bytes, demand)
    least = max(demand.max_batch, -(-demand.longest_prefill // demand.block_size)) + 1
    if not least <= blocks <= budget // block_bytes:
        raise SpaceError(
            f"{blocks} KV blocks of {gib(block_bytes)}: the buckets need {least}, memory holds {budget // block_bytes}",
            "smaller --buckets and --batch-sizes, or more memory",
        )
    capacity = (blocks - 1) * demand.block_size
    if capacity < demand.context and recipe.context is not None:
        raise SpaceError(
            f"context {recipe.context} is more than the {capacity} tokens that KV holds", f"--context {capacity}"
        )
    return KVSize(blocks, blocks * block_bytes, weight_bytes, min(demand.context, capacity), reason)


def _choose_blocks(asked: int | None, affordable: int, demand: Demand) -> tuple[int, str]:
    wanted = demand.max_batch * -(-demand.context // demand.block_size) + 1
    if asked is not None:
        return asked, "asked for"
    if wanted <= affordable:
        return wanted, f"{demand.max_batch} sequences of {demand.context} tokens, and one block for padding"
    return affordable, f"what is left of memory; {demand.max_batch} full sequences would take {wanted}"


def _kv_budget(recipe: Recipe, environment: Environment, device: str, weight_bytes: int) -> int:
    if not 0.0 < recipe.memory_fraction <= 1.0:
        raise UsageError(f"memory fraction {recipe.memory_fraction} is not between 0 and 1", "--memory-fraction 0.9")
    if device == "cpu":
        return int((environment.host_memory_bytes - weight_bytes) * HOST_KV_FRACTION)
    return int(environment.gpu_memory_bytes * recipe.memory_fraction) - weight_bytes - GPU_RESERVE_BYTES


def _memory_name(recipe: Recipe, environment: Environment, device: str) -> str:
    if device == "cpu":
        return f"the host has {gib(environment.host_memory_bytes)}"
    total = gib(environment.gpu_memory_bytes)
    return f"{environment.gpu} has {total}, of which {recipe.memory_fraction:.0%} may be filled"


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"
