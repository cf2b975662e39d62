"""Decides context, buckets, batch sizes, block size and KV memory. Does not import torch."""

from __future__ import annotations

from tcdeploy.errors import UsageError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.decision import Decision, PlanInputs
from tcdeploy.planning.memory import CacheDemand, KVSize, gib, predict_workspace, size_kv_cache
from tcdeploy.planning.recipe import Device, Recipe

DEFAULT_PREFILL_BUCKETS = (128, 512, 2048)
DEFAULT_BATCH_SIZES: dict[Device, tuple[int, ...]] = {"cuda": (1, 4, 16, 32), "cpu": (1, 4)}
MIN_PREFILL_SEQUENCES, TOKENS_PER_PREFILL_SEQUENCE = 8, 512
DYNAMIC_MIN_SIZE = 2  # torch specialises sizes 0 and 1, so a dynamic program starts at 2
BLOCK_SIZE = 16


# (up to this number of tokens, distance between two sizes): from 160 tokens on, steps have 5% padding on average.
GRAPH_SIZE_STEPS = ((128, 16), (512, 32), (2048, 64), (8192, 256))
LARGEST_GRAPH_SIZE_STEP = 1024


def graph_sizes(max_tokens: int) -> tuple[int, ...]:
    """The token counts at which a program with a symbolic size is captured, ascending, up to `max_tokens`."""
    sizes: list[int] = []
    size = 0
    while size < max_tokens:
        size += next((step for limit, step in GRAPH_SIZE_STEPS if size < limit), LARGEST_GRAPH_SIZE_STEP)
        sizes.append(min(size, max_tokens))
    return tuple(sizes)


def max_prefill_sequences(max_prefill_tokens: int) -> int:
    """The number of prompts that a prefill step may pack if the largest bucket has `max_prefill_tokens` tokens.

    Programs contain this number, so it is the same for all common bucket sizes: 8 up to 4,096 tokens.
    """
    return max(MIN_PREFILL_SEQUENCES, max_prefill_tokens // TOKENS_PER_PREFILL_SEQUENCE)


def decide_context(recipe: Recipe, architecture: Architecture, decisions: list[Decision]) -> int:
    limit = architecture.rope_limit or architecture.context
    if recipe.context is None:
        if architecture.rope_limit:
            reason = "longer sequences would change the rotary factors of the whole batch (longrope, dynamic rope)"
            decisions.append(Decision("context", str(limit), reason, is_fallback=limit < architecture.context))
        else:
            decisions.append(Decision("context", str(limit), "the model's maximum"))
        return limit
    if not 2 <= recipe.context <= limit:
        raise UsageError(
            f"context {recipe.context} is not between 2 and {limit}, the longest that this model supports",
            f"--context {limit}",
        )
    decisions.append(Decision("context", str(recipe.context), "requested"))
    return recipe.context


def decide_batch_sizes(recipe: Recipe, device: Device, decisions: list[Decision]) -> tuple[int, ...]:
    sizes, reason = DEFAULT_BATCH_SIZES[device], f"default on {device}"
    if recipe.batch_sizes is not None:
        _check_ascending("batch sizes", recipe.batch_sizes)
        sizes, reason = recipe.batch_sizes, "requested"
    decisions.append(Decision("decode buckets", _comma_separated(sizes), reason))
    return sizes


def decide_prefill_lengths(recipe: Recipe, context: int, decisions: list[Decision]) -> tuple[int, ...]:
    """Ascending lengths in tokens; with dynamic shapes only the last, whose program serves all lengths up to it."""
    if recipe.buckets is None:
        lengths = tuple(length for length in DEFAULT_PREFILL_BUCKETS if length <= context) or (context,)
        reason = f"default, up to the context of {context}"
    else:
        lengths, reason = recipe.buckets, "requested"
        _check_ascending("buckets", lengths)
        if lengths[-1] > context:
            raise UsageError(
                f"bucket {lengths[-1]} exceeds the context of {context} tokens",
                "remove that bucket: longer prompts are prefilled in chunks",
            )
    if recipe.shapes == "dynamic":
        return (_decide_dynamic_length(lengths[-1], decisions),)
    decisions.append(Decision("prefill buckets", _comma_separated(lengths), reason))
    return lengths


def _decide_dynamic_length(length: int, decisions: list[Decision]) -> int:
    if length <= DYNAMIC_MIN_SIZE:
        raise UsageError(
            f"a dynamic range cannot end at {length} tokens: it starts at {DYNAMIC_MIN_SIZE}",
            "--buckets 512 --shapes dynamic",
        )
    reason = "one program with a symbolic size, captured at many sizes on a GPU"
    decisions.append(Decision("prefill buckets", f"{DYNAMIC_MIN_SIZE}-{length}", reason))
    return length


def _check_ascending(name: str, values: tuple[int, ...]) -> None:
    if not values or values[0] < 1:
        raise UsageError(f"{name} must be 1 or more, not {_comma_separated(values) or 'none'}", "such as 1,4,16")
    if any(low >= high for low, high in zip(values, values[1:], strict=False)):
        raise UsageError(
            f"{name} {_comma_separated(values)} are not in ascending order",
            _comma_separated(tuple(sorted(set(values)))),
        )


def decide_block_size(recipe: Recipe, decisions: list[Decision]) -> int:
    size = BLOCK_SIZE if recipe.block_size is None else recipe.block_size
    if size < 16 or size & (size - 1):
        raise UsageError(f"block size {size} is not a power of two of at least 16", "--block-size 16")
    reason = "the smallest that the kernels support" if recipe.block_size is None else "requested"
    decisions.append(Decision("block size", str(size), reason))
    return size


def decide_memory(inputs: PlanInputs, demand: CacheDemand, decisions: list[Decision]) -> tuple[int, KVSize]:
    """(workspace bytes while serving, 0 on a CPU; KV size). Replaces the context decision if memory shortens it."""
    workspace = predict_workspace(
        inputs.architecture, inputs.dtypes.compute, demand, max_prefill_sequences(demand.max_prefill_tokens)
    )
    kv = size_kv_cache(inputs, demand, workspace)
    if kv.context < demand.context:
        decisions[:] = [decision for decision in decisions if decision.name != "context"]
        reason = f"KV memory holds less than the model's maximum of {demand.context}"
        decisions.append(Decision("context", str(kv.context), reason, is_fallback=True))
    decisions.append(Decision("KV blocks", f"{kv.blocks} ({gib(kv.kv_bytes)})", kv.reason))
    if inputs.device == "cpu":
        return 0, kv
    parts = ", ".join(
        f"{name.removesuffix('_bytes').replace('_', ' ')} {gib(value)}" for name, value in workspace._asdict().items()
    )
    reason = f"predicted: {parts} (released after warm-up)"
    decisions.append(Decision("workspace", gib(workspace.serving_bytes), reason))
    return workspace.serving_bytes, kv


def _comma_separated(values: tuple[int, ...]) -> str:
    return ",".join(str(value) for value in values)
